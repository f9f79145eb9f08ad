"""The benchmark harness and what it measures, on a tiny model."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from test_capacity import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from hf_paged.bench import harness
from hf_paged.bench.decode import DYNAMIC, PAGED, DecodePoint, measure_decode, share_weights
from hf_paged.bench.memory import LENGTHS, measure_memory
from hf_paged.bench.report import print_suite
from hf_paged.bench.suite import SuiteOptions, run_suite

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def test_variants_take_turns_and_each_round_begins_with_another() -> None:
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    harness.compare(variants, repeats=3, warmup=1)
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"


def test_the_order_may_be_by_lot() -> None:
    names = list("abcde")
    orders = ["".join(harness.shuffled(names, index)) for index in range(-1, 20)]
    assert all(sorted(order) == names for order in orders) and len(set(orders)) > 10
    assert orders == ["".join(harness.shuffled(names, index)) for index in range(-1, 20)]
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in names}
    harness.compare(variants, repeats=2, warmup=0, order=harness.shuffled)
    assert "".join(calls) == orders[1] + orders[2]


def test_ratios_are_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine slows down five times half-way; the variant is twice as fast throughout.
    clock = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    count = {"slow": 0, "fast": 0}

    def work(name: str, seconds: float) -> None:
        count[name] += 1
        clock[0] += seconds * (5 if count[name] > 2 else 1)

    comparison = harness.compare(
        {"slow": lambda: work("slow", 2.0), "fast": lambda: work("fast", 1.0)}, repeats=4, warmup=0, units=2
    )
    assert comparison.timings["slow"].seconds == (1.0, 1.0, 5.0, 5.0)
    assert comparison.timings["slow"].median == 3.0
    assert comparison.timings["slow"].min == 1.0
    assert comparison.timings["slow"].iqr == 4.0
    ratio = comparison.ratio("fast")
    assert ratio.values == (2.0,) * 4
    assert (ratio.median, ratio.iqr) == (2.0, 0.0)
    assert comparison.ratio("slow", baseline="fast").median == 0.5
    assert json.loads(json.dumps(comparison.as_dict()))["times_faster"]["fast"]["median"] == 2.0


def test_the_device_is_waited_for_at_every_reading_of_the_clock() -> None:
    events: list[str] = []
    harness.compare({"a": lambda: events.append("a")}, repeats=1, warmup=0, sync=lambda: events.append("sync"))
    assert events == ["sync", "a", "sync"]


def test_garbage_collection_is_back_on_after_an_error() -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.compare({"a": fail})
    assert gc.isenabled()


def test_the_machine_is_described() -> None:
    machine = harness.describe_machine()
    assert machine.cpu and machine.logical_cpus > 0 and machine.memory_bytes > 0
    assert {"python", "torch", "transformers"} <= machine.versions.keys()
    assert json.dumps(machine.as_dict())
    assert machine.cpu in str(machine)


def test_read_bandwidth_is_plausible() -> None:
    assert 1e6 < harness.measure_read_bandwidth(1 << 20, repeats=3) < 1e14


def test_models_that_share_weights_are_set_apart(tiny_llama: LlamaForCausalLM) -> None:
    from hf_paged import enable_paged_attention

    twin = share_weights(tiny_llama)
    pairs = zip(tiny_llama.parameters(), twin.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    before = tiny_llama.config._attn_implementation
    enable_paged_attention(twin)
    assert tiny_llama.config._attn_implementation == before != twin.config._attn_implementation


@pytest.mark.smoke
def test_decode_steps_of_both_caches_agree(tiny_llama: LlamaForCausalLM) -> None:
    points = [DecodePoint(1, 40), DecodePoint(3, 70)]
    results = list(measure_decode(tiny_llama, points, rounds=2, steps=2))
    assert [result.point for result in results] == points
    for result in results:
        assert result.agrees, result.logit_difference
        assert result.comparison.timings.keys() == {DYNAMIC, PAGED}
        assert result.comparison.ratio(PAGED).median > 0
        assert (
            result.kv_bytes == result.point.batch * result.point.length * 2 * 2 * 2 * 16 * 4
        )  # K and V, layers, heads
        assert result.read_bandwidth > 0
        assert json.dumps(result.as_dict())


def test_a_wrong_result_is_noticed(tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.bench import decode

    fill = decode.fill

    def spoil(cache: object, prefix: list, point: DecodePoint) -> None:
        prefix = prefix if not hasattr(cache, "pool") else [(k, torch.zeros_like(v)) for k, v in prefix]
        fill(cache, prefix, point)

    monkeypatch.setattr(decode, "fill", spoil)
    (result,) = measure_decode(tiny_llama, [DecodePoint(1, 40)], rounds=1, steps=1)
    assert not result.agrees


@pytest.mark.parametrize("is_refused", [False, True])
def test_where_nothing_can_be_compiled_the_suite_says_so(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    from hf_paged.bench import suite
    from hf_paged.patches import compiled

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler\nand why")

    expected = "decode steps cannot be compiled: no compiler"
    if is_refused:  # a model that goes on eagerly with a message, and so would be measured eagerly
        monkeypatch.setattr(compiled._Graphs, "find", lambda *args: fails)
        expected = "decode steps cannot be compiled: RuntimeError: no compiler"
    else:
        monkeypatch.setattr(suite, "measure_compiled", fails)
    result = run_suite(tiny_llama, SuiteOptions(parts=["compiled"], points=[DecodePoint(1, 20)], rounds=1))
    assert result.compiled_error == expected
    assert not result.compiled


@pytest.mark.smoke
def test_memory_counts_real_tokens_and_whole_blocks(tiny_llama: LlamaForCausalLM) -> None:
    lengths, steps, size = (5, 33, 64), 3, 16
    result = measure_memory(tiny_llama, lengths, steps=steps, block_size=size)
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
    stored = [length + steps - 1 for length in lengths]
    assert result.tokens == sum(stored)
    assert result.token_bytes == sum(stored) * per_token
    assert result.paged_bytes == sum(-(-n // size) for n in stored) * size * per_token
    assert result.dynamic_bytes == len(lengths) * max(stored) * per_token
    assert 0 < result.paged_overhead < result.dynamic_overhead
    assert json.dumps(result.as_dict())


def test_the_ragged_batch_is_what_the_target_is_about() -> None:
    assert (min(LENGTHS), max(LENGTHS)) == (30, 1000)
    assert sum(LENGTHS) / len(LENGTHS) >= 500


def test_blocks_take_at_most_four_percent_above_the_tokens(tiny_llama: LlamaForCausalLM) -> None:
    assert measure_memory(tiny_llama).paged_overhead <= 0.04


@pytest.fixture
def without_generate_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own batching takes half a minute to find out how much memory there is."""
    from hf_paged.bench import batching

    def one_by_one(model, ids, new_tokens):
        return [batching.generate_padded(model, [row], count)[0] for row, count in zip(ids, new_tokens, strict=True)]

    monkeypatch.setattr(batching, "generate_batch", one_by_one)


@pytest.mark.slow
def test_generate_batch_does_the_workload(tiny_llama: LlamaForCausalLM) -> None:
    from hf_paged.bench import batching

    ids = [[5, 6, 7], [8, 9]]
    expected = [batching.generate_padded(tiny_llama, [row], count)[0] for row, count in zip(ids, (4, 6), strict=True)]
    assert batching.generate_batch(batching.without_eos(tiny_llama), ids, (4, 6)) == expected


def test_another_token_shows_in_the_share_that_agrees(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, without_generate_batch: None
) -> None:
    from hf_paged.bench import batching

    padded = batching.generate_padded
    monkeypatch.setattr(batching, "generate_padded", lambda *args: [[0, *row[1:]] for row in padded(*args)])
    result = batching.measure_batching(tiny_llama, batching.Workload("two", (5, 9), (3, 4)), rounds=1)
    assert result.agrees == 0.0


def test_the_suite_prints_and_gives_json(tiny_llama: LlamaForCausalLM, without_generate_batch: None) -> None:
    options = SuiteOptions(points=[DecodePoint(2, 32)], rounds=2, quick=True)
    result = run_suite(tiny_llama, options)
    assert result.passed
    saved = json.loads(json.dumps(result.as_dict()))
    assert saved["prefill"][0]["length"] == 32 and saved["blocks"]["recommendation"]["block_size"] == 16
    assert saved["decode"][0]["length"] == 32 and saved["memory"]["tokens"] > 0
    assert saved["attention_us"][0]["paged"] > 0
    assert saved["compiled"][0]["new_graphs"] == 1
    assert saved["batching"][0]["agrees"] == 1.0 and len(saved["batching"][0]["tokens_per_second"]) >= 3
    assert saved["capacity"]["paged_requests"] > saved["capacity"]["reserved_requests"]
    assert saved["host"]["begin_us"] > 0
    console = Console(width=140, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_suite(result, console)
    text = console.export_text()
    for expected in (
        "One attention layer",
        "One decode step",
        "as static*",
        "Memory of",
        "Reading prompts",
        "Block sizes",
        "Host time",
    ):
        assert expected in text


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v3", "gemma3n_text"])
def test_models_of_every_kind_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, states, latents, layers that read the keys of others, and one that has no sdpa."""
    from hf_paged.bench import decode, host
    from hf_paged.bench.beams import measure_beams

    monkeypatch.setattr(decode, "measure_read_bandwidth", lambda *args: 1.0)
    monkeypatch.setattr(gc, "collect", lambda *args: 0)  # most of the time here
    monkeypatch.setattr(host, "ROWS", 2)
    monkeypatch.setattr(host, "LENGTH", 20)
    monkeypatch.setattr(host, "STEPS", 2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    parts = ("decode", "blocks", "host")
    result = run_suite(model, SuiteOptions(parts=parts, points=[DecodePoint(2, 40)], rounds=1, block_sizes=(16,)))
    assert result.passed and not result.failures and not result.left_out, result.failures
    assert result.blocks.without_static is None
    memory = measure_memory(model, (5, 20), steps=2)
    assert memory.dynamic_bytes > 0 and memory.tokens <= 6 + 21
    assert measure_beams(model, prompts=1, beams=2, length=20, new_tokens=3, rounds=1).dynamic_bytes > 0


def test_a_model_that_is_not_batched_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.bench import batching

    monkeypatch.setattr(batching, "generate_padded", lambda *args: pytest.fail("measured before it is refused"))
    for name, reason in (("deepseek_v3", "cannot be batched continuously"), ("qwen3_next", "recurrent layers")):
        model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
        result = run_suite(model, SuiteOptions(parts=["batching", "capacity"], quick=True))
        assert result.passed and not result.batching and result.capacity is None
        assert all(reason in result.left_out[part] for part in ("batching", "capacity"))


def test_the_bytes_of_a_step_are_those_of_its_windows() -> None:
    config = tiny_config("gemma3n_text")  # of six layers, every other has a window of 8, and two read those of others
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    (result,) = measure_decode(model, [DecodePoint(3, 50)], rounds=1, steps=1)
    per_token = 2 * 2 * 16 * 4  # K and V, heads, head_dim, float32
    assert result.kv_bytes == 3 * per_token * (2 * 7 + 2 * 50)
    assert result.added_bytes == 3 * per_token * 2 * (50 - 16)


def test_where_a_model_does_not_run_with_a_static_cache_it_is_left_out() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=199, hidden_size=64, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    options = SuiteOptions(parts=["blocks"], points=[DecodePoint(2, 40)], rounds=1, block_sizes=(16, 32))
    result = run_suite(model, options)
    assert result.passed and result.blocks.without_static.startswith("RuntimeError")
    assert "static" not in result.blocks.points[0].kv_bytes
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_suite(result, console)
    assert "StaticCache is left out" in console.export_text()


def test_a_part_that_breaks_off_leaves_the_others(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.bench import suite

    def breaks(*args: object, **kwargs: object) -> None:
        raise MemoryError("not so much\nof it")

    monkeypatch.setattr(suite, "measure_decode", breaks)
    result = run_suite(tiny_llama, SuiteOptions(parts=["prefill", "decode"], points=[DecodePoint(1, 20)], rounds=1))
    assert len(result.prefill) == 1 and not result.decode and not result.passed
    assert result.as_dict()["failures"] == {"decode": "MemoryError: not so much"}
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_suite(result, console)
    assert "Reading prompts" in (text := console.export_text()) and "decode broke off: MemoryError" in text


def test_without_generate_batch_the_other_ways_are_measured(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.bench import batching

    def refuses(*args: object) -> None:
        raise ValueError("no such attention")

    monkeypatch.setattr(batching, "generate_batch", refuses)
    result = run_suite(tiny_llama, SuiteOptions(parts=["batching"], quick=True))
    (found,) = result.batching
    assert result.passed and found.left_out == "ValueError: no such attention"
    assert batching.BATCH not in found.comparison.timings and batching.MANY in found.comparison.timings
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_suite(result, console)
    assert "generate_batch is left out" in console.export_text()


def test_a_beam_search_is_compared_as_a_whole(tiny_llama):
    from hf_paged.bench.beams import measure_beams

    result = measure_beams(tiny_llama, prompts=2, beams=3, length=80, new_tokens=6, rounds=1)
    assert result.agrees
    # Six rows of 80 + 5 tokens, two layers, keys and values of two heads of 16 floats; blocks of two prompts and what
    # the beams grew by.
    assert result.dynamic_bytes == 6 * 85 * 2 * 2 * 2 * 16 * 4
    assert 2 * 80 / (6 * 85) < result.memory_share < 0.7
    assert result.as_dict()["times_faster"]["paged"]["median"] > 0
