"""Which block size: what is measured on a tiny model, and what made-up measurements lead to."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_paged.bench.block_sizes import (
    AGAIN,
    STATIC,
    BlockSizePoint,
    BlockSizesResult,
    Verdict,
    block_waste,
    gains,
    measure_block_sizes,
    padded_waste,
    ragged_lengths,
    recommend,
)
from hf_paged.bench.decode import DYNAMIC, PAGED, DecodePoint
from hf_paged.bench.harness import Comparison, Ratio, Timing, describe_machine
from hf_paged.bench.picture import save_block_sizes
from hf_paged.bench.prefill import PrefillResult, measure_prefill, prefill_point
from hf_paged.bench.report import print_suite
from hf_paged.bench.suite import SuiteResult
from hf_paged.cli import app

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})

WASTE = {16: 0.015, 32: 0.03, 64: 0.06, 256: 0.2}
CALM = (0.99, 1.0, 1.0, 1.0, 1.01)


def made_up(**gains_of: tuple[float, ...]) -> dict[int, Ratio]:
    """Gains by size: `s32=(...)`; those that are not given are calm."""
    found = {size: gains_of.get(f"s{size}", CALM) for size in WASTE}
    return {size: Ratio(str(size), "16", tuple(values)) for size, values in found.items()}


def around(median: float, spread: float) -> tuple[float, ...]:
    """Five rounds with quartiles `spread` off the median."""
    return (median - 2 * spread, median - spread, median, median + spread, median + 2 * spread)


@pytest.mark.parametrize(
    ("decode", "prefill", "verdict", "size", "says"),
    [
        pytest.param({}, {}, Verdict.STAY, 16, "Stay with 16: no other size is faster by more than", id="all-alike"),
        pytest.param(
            {"s64": around(1.02, 0.025)},
            {},
            Verdict.STAY,
            16,
            "Stay with 16: no other size is faster by more than the spread (best in decode: 64, 1.02 times as fast, "
            "quartiles 0.99 to 1.04, 5 rounds); blocks of 64 waste 6.0% of their slots, those of 16 1.5%.",
            id="within-the-spread",
        ),
        pytest.param({"s32": around(1.03, 0.005)}, {}, Verdict.STAY, 16, "faster by 5% or more", id="sure-but-small"),
        pytest.param(
            {f"s{size}": around(0.9, 0.01) for size in (32, 64, 256)},
            {},
            Verdict.STAY,
            16,
            "no other size is faster (best in decode: ",
            id="all-others-slower",
        ),
        pytest.param(
            {"s32": around(1.12, 0.02)},
            {},
            Verdict.CHANGE,
            32,
            "32: 1.12 times as fast in decode as 16 (1.10 to 1.14, 5 rounds), 1.00 times in prefill; blocks of 32 "
            "waste 3.0% of their slots, those of 16 1.5%.",
            id="faster-in-decode",
        ),
        pytest.param({}, {"s64": around(1.2, 0.01)}, Verdict.CHANGE, 64, "as fast in prefill as 16", id="in-prefill"),
        pytest.param(
            {"s32": around(1.2, 0.01), "s64": around(1.205, 0.01)}, {}, Verdict.CHANGE, 32, "32: ", id="least-waste"
        ),
        pytest.param(
            {"s32": around(1.1, 0.01), "s64": around(1.3, 0.01)}, {}, Verdict.CHANGE, 64, "64: ", id="much-faster"
        ),
        pytest.param(
            {"s256": around(1.12, 0.01)},
            {},
            Verdict.STAY,
            16,
            "256 is 1.12 times as fast in decode (1.11 to 1.13, 5 rounds), but adds 23.1% to the memory",
            id="not-worth-its-memory",
        ),
        pytest.param({"s256": around(1.4, 0.01)}, {}, Verdict.CHANGE, 256, "256: 1.40", id="worth-its-memory"),
        pytest.param(
            {"s32": around(1.12, 0.01)}, {"s32": around(0.9, 0.01)}, Verdict.STAY, 16, "", id="slower-in-the-other"
        ),
        pytest.param(
            {"s64": around(1.08, 0.1)},
            {},
            Verdict.UNSURE,
            16,
            "Not sure: the spread is larger than the differences (64 in decode: 1.08 times as fast, quartiles 0.98 to "
            "1.18, 5 rounds). Leave the machine alone and use --rounds 15; until then stay with 16.",
            id="spread-hides-it",
        ),
        pytest.param(
            {"s16": around(1.06, 0.01), "s32": around(1.2, 0.01)},
            {},
            Verdict.UNSURE,
            16,
            "even blocks of 16 against themselves are 1.05 to 1.07 times as fast in decode",
            id="chance-is-as-large",
        ),
        pytest.param({}, {"s16": around(0.94, 0.01)}, Verdict.UNSURE, 16, "fast in prefill", id="chance-in-prefill"),
    ],
)
def test_what_measurements_lead_to(decode: dict, prefill: dict, verdict: Verdict, size: int, says: str) -> None:
    found = recommend(made_up(**decode), made_up(**prefill), WASTE)
    assert (found.verdict, found.block_size) == (verdict, size), found.text
    assert says in found.text


def test_few_rounds_are_never_sure() -> None:
    few = {size: Ratio(str(size), "16", (1.0 if size == 16 else 1.5,) * 4) for size in WASTE}
    found = recommend(few, few, WASTE)
    assert found.verdict is Verdict.UNSURE and "4 rounds cannot tell" in found.text and "--rounds 15" in found.text
    one = {size: Ratio(str(size), "16", ratio.values[:1]) for size, ratio in few.items()}
    assert "1 round cannot" in recommend(one, one, WASTE).text


def test_more_rounds_than_there_were_are_asked_for() -> None:
    noisy = {size: Ratio(str(size), "16", around(1.0, 0.2) * 4) for size in WASTE}
    assert "--rounds 41" in recommend(noisy, noisy, WASTE).text


def test_a_single_size_is_stayed_with() -> None:
    only = {32: Ratio("32", "32", CALM)}
    found = recommend(only, only, {32: 0.03})
    assert (found.verdict, found.block_size) == (Verdict.STAY, 32)


def comparison(**factors: float) -> Comparison:
    """Five rounds in which each side takes its factor of a second, the second round twice as long."""
    return Comparison({name: Timing(name, (f, 2 * f, f, f, f)) for name, f in factors.items()}, next(iter(factors)))


def test_gains_are_means_over_points_within_rounds() -> None:
    one, two = ({DYNAMIC: 3.0, "16": 2.0, AGAIN: 2.0, "32": seconds} for seconds in (1.0, 4.0))
    found = gains([comparison(**one), comparison(**two)], (16, 32))
    assert found[16].values == (1.0,) * 5
    assert found[32].values == pytest.approx((1.0,) * 5)  # twice as fast at one point, half as fast at the other
    assert gains([comparison(**one)], (16, 32))[32].median == 2.0


def test_waste_is_that_of_a_cache_with_such_rows(tiny_llama: LlamaForCausalLM) -> None:
    from hf_paged import PagedCache

    lengths = ragged_lengths(40)
    assert (min(lengths), max(lengths), len(lengths)) == (20, 60, 256)
    for size in (16, 64):
        tokens = blocks = 0
        for length in sorted(set(lengths)):
            cache = PagedCache(tiny_llama.config, block_size=size, num_blocks=8)
            cache.update(torch.zeros(1, 2, length, 16), torch.zeros(1, 2, length, 16), 0)
            tokens += lengths.count(length) * length
            blocks += lengths.count(length) * cache.stats().used_blocks
        assert block_waste(40, size) == pytest.approx(1 - tokens / (blocks * size))
    assert padded_waste(40) == pytest.approx(1 / 3, abs=0.01)


def test_a_prompt_is_read_by_both_caches_alike(tiny_llama: LlamaForCausalLM) -> None:
    points = [DecodePoint(3, 40), DecodePoint(9, 100), DecodePoint(1, 40), DecodePoint(2, 100)]
    results = list(measure_prefill(tiny_llama, points, rounds=2))
    assert [result.point for result in results] == [(3, 40), (2, 100), (1, 40)]  # on a CPU, and each once
    for result in results:
        assert result.agrees, result.logit_difference
        assert result.comparison.timings.keys() == {DYNAMIC, PAGED}
        assert json.dumps(result.as_dict())
    assert prefill_point(DecodePoint(9, 100), torch.device("cuda")) == (9, 100)
    assert prefill_point(DecodePoint(9, 5000), torch.device("cpu")) == (1, 5000)


@pytest.mark.smoke
def test_all_sizes_and_both_other_caches_compute_the_same(tiny_llama: LlamaForCausalLM) -> None:
    points = [DecodePoint(1, 40), DecodePoint(3, 70)]
    result = measure_block_sizes(tiny_llama, points, (64, 16), rounds=2, steps=2)
    assert result.sizes == (16, 64) and result.agrees
    assert result.lengths == [40, 70] and [prefill.point for prefill in result.prefills] == points
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
    for found, length in zip(result.points, (40, 70), strict=True):
        grown = length + 2 * (2 + 2)  # rounds, and those to warm up
        rows = found.point.batch * per_token
        assert found.kv_bytes == {
            DYNAMIC: grown * rows,
            STATIC: grown * rows,
            "16": -(-grown // 16) * 16 * rows,
            "64": -(-grown // 64) * 64 * rows,
            AGAIN: -(-grown // 16) * 16 * rows,
        }
        assert found.steps.timings.keys() == found.prefill.comparison.timings.keys() == found.kv_bytes.keys()
    saved = json.loads(json.dumps(result.as_dict()))
    assert saved["recommendation"]["verdict"] == "unsure"  # of two rounds
    assert saved["waste"][1]["64"] == block_waste(70, 64) and saved["waste"][1]["length"] == 70
    assert saved["times_as_fast_as_smallest"]["prefill"]["64"]["median"] > 0


def test_a_side_that_computes_something_else_is_noticed(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.bench import decode

    fill = decode.fill

    def spoil(cache: object, prefix: list, point: DecodePoint) -> None:
        is_spoilt = hasattr(cache, "pool") and cache.pool.block_size == 32
        fill(cache, [(k, torch.zeros_like(v)) for k, v in prefix] if is_spoilt else prefix, point)

    monkeypatch.setattr(decode, "fill", spoil)
    result = measure_block_sizes(tiny_llama, [DecodePoint(1, 40)], (16, 32), rounds=1, steps=1)
    assert not result.agrees and not result.points[0].agrees


def example(lengths: tuple[int, ...] = (1000,)) -> BlockSizesResult:
    sides = {DYNAMIC: 1.3, STATIC: 1.4, "16": 1.0, AGAIN: 1.0, "32": 0.8, "64": 0.82}
    prefill = PrefillResult(DecodePoint(1, 1000), comparison(**sides), 0.0, 1.0)
    kv_bytes = dict.fromkeys(sides, 1_000_000)
    points = (BlockSizePoint(DecodePoint(2, n), comparison(**sides), prefill, kv_bytes, 0.0, 1.0) for n in lengths)
    return BlockSizesResult((16, 32, 64), tuple(points))


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    result = SuiteResult("model", "float32", "cpu", 16, describe_machine(), blocks=example((1000, 200)))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_suite(result, console)
    text = console.export_text()
    for expected in ("decode steps of 2 x 1,000", "decode steps of 2 x 200", "prompts of 1 x 1,000", "16 again"):
        assert expected in text, expected
    assert "1.25 (1.25-1.25)" in text and "…" not in text
    assert "32: 1.25 times as fast in decode as 16" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_block_sizes(example((1000, 200)), "a title", tmp_path / "blocks.png")
    data = (tmp_path / "blocks.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1440, 720)
    save_block_sizes(example(), "a title", tmp_path / "blocks.svg")
    assert "<svg" in (tmp_path / "blocks.svg").read_text()


def test_one_command_answers(tiny_llama_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--points", "2x40", "--rounds", "1", "--block-sizes", "32, 16", "--picture", str(tmp_path / "b.svg")]
    result = runner.invoke(app, ["bench", "--model", str(tiny_llama_folder), "--only", "blocks", *options])
    assert result.exit_code == 0, result.output
    assert "Not sure: 1 round cannot tell" in result.stdout and "2 x 40" in result.stdout
    assert (tmp_path / "b.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--block-sizes", "16,24"], "'24' is not a power of two up to 256"),
        (["--block-sizes", "512"], "'512' is not a power"),
        (["--block-sizes", "0"], "'0' is not a power"),
        (["--picture", "blocks.jpg"], "ends neither in .png nor in .svg"),
        (["--picture", "/no/such/folder/x.png"], "does not exist"),
        (["--picture", "x.png", "--only", "decode"], "which --only leaves out"),
    ],
)
def test_wrong_usage_is_noticed_before_anything_is_measured(arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    assert expected in result.stderr


def test_without_matplotlib_the_picture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, ["bench", "--only", "blocks", "--picture", "x.png"])
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
