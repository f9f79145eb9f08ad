"""The GPU benchmark at toy size, in Triton's interpreter: it runs to its end, and what goes wrong is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from hf_paged.bench.gpu import correctness, supervisor
from hf_paged.bench.gpu.__main__ import parse
from hf_paged.bench.gpu.cases import DIMS, Case, Rows, correctness_cases
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.recorder import Recorder
from hf_paged.bench.gpu.results import SECTIONS
from hf_paged.bench.gpu.sizes import GPU_SIZES, TOY_SIZES
from hf_paged.bench.gpu.worker import work
from hf_paged.kernels import gpu as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PEERS = ("varlen_attn", "cuDNN", "generate_batch", "two devices")  # that a CPU does not have


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_paged.bench.gpu", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300, check=False)


def results_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8"))["results"]


def recorder(folder: Path, seconds: float = 60.0, *, resume: bool = False) -> Recorder:
    return Recorder(folder, time.time() + seconds, resume=resume)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("toy") / "results"
    return run("--toy", "--output", folder), folder


def test_the_toy_run_ends_well(toy: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = toy
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    results = state["results"]
    assert state["finished"] and state["running"] is None
    assert state["about"]["toy"] and {"torch", "transformers", "triton"} <= state["about"]["versions"].keys()
    assert [result for result in results if result["error"] is not None] == []
    assert {result["section"] for result in results} == set(SECTIONS)
    for section in SECTIONS:
        assert any(result["values"] for result in results if result["section"] == section)
    assert sorted(path.name for path in folder.iterdir()) == ["gpu.json", "gpu.md"]


def test_every_toy_correctness_case_passed(toy: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    cases = [result for result in results_in(toy[1]) if result["section"] == "correctness"]
    assert len(cases) > 10
    assert all(case["passed"] for case in cases)
    assert {case["name"].split()[0].rstrip(",") for case in cases} == {
        *("decode", "prefill", "fixed", "write", "copy_blocks")
    }


def test_only_peers_are_skipped_and_each_is_named(toy: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    skipped = [result for result in results_in(toy[1]) if result["skipped"] is not None]
    for result in skipped:
        assert result["name"].endswith(PEERS), result
        assert result["skipped"]
    for peer in PEERS:
        assert any(result["name"].endswith(peer) for result in skipped)


def test_results_are_printed_as_they_come_and_again_as_a_table(
    toy: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = toy
    table = (folder / "gpu.md").read_text(encoding="utf-8")
    assert done.stdout.endswith(table)
    lines = done.stdout.splitlines()
    for result in results_in(folder):
        assert any(line.startswith(f"[{result['section']}] {result['name']}: ") for line in lines)
        assert f"\n| {result['name']} |" in table
    widths = [line.count(" |") for line in table.splitlines() if line.startswith("|")]
    assert min(widths) > 1


def test_the_paged_model_gives_the_tokens_of_the_others(toy: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    values = {result["name"].split()[-1]: result["values"] for result in results_in(toy[1])}
    assert values["PagedCache"]["backend"] == "triton"
    assert values["PagedCache"]["equal_tokens"] == values["StaticCache"]["equal_tokens"] == 1.0
    assert values["PagedCache"]["step_ms"] > 0 and values["DynamicCache"]["tokens_per_s"] > 0


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")  # and the script would run, for minutes
    assert work(parse(["--output", str(tmp_path / "none")])) == 2
    said = capsys.readouterr().err
    assert "--toy" in said and len(said.strip().splitlines()) == 1
    refuses = [sys.executable, "-c", "import sys; sys.exit(2)"]  # the exit code is passed on
    assert supervisor.supervise(refuses, tmp_path, time.time() + 60) == 2


def test_no_time_is_recorded_as_such(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = parse(["--toy", "--budget", "0", "--only", "decode,prefill,generate", "--output", str(tmp_path)])
    assert work(options) == 0
    results = results_in(tmp_path)
    assert {result["section"] for result in results} == {
        *("machine", "compile", "decode", "sweep", "prefill", "generate")
    }
    assert {result["skipped"] for result in results} == {"out of time"}
    assert "out of time" in (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "out of time" in capfd.readouterr().out


def test_a_wrong_kernel_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = kernels.decode

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return decode(*arguments, **options) * 1.01

    monkeypatch.setattr(kernels, "decode", wrong)
    cases = [case for case in correctness_cases(TOY_SIZES) if case.kind == "decode"][:1]
    monkeypatch.setattr(correctness, "correctness_cases", lambda sizes: cases)
    assert work(parse(["--toy", "--only", "correctness", "--output", str(tmp_path)])) == 1
    passed = {result["name"]: result["passed"] for result in results_in(tmp_path) if result["passed"] is not None}
    assert [name for name, well in passed.items() if not well] == [cases[0].name]


def test_what_a_section_or_a_measurement_raises_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no\ngood")

    record = recorder(tmp_path)
    record.measure("decode", "ours", fail)
    record.measure("decode", "a peer", fail, peer=True)
    record.section("blocks", fail)
    record.measure("decode", "good", lambda: {"us": 1.0, "odd": float("nan")})
    ours, peer, section, good = results_in(tmp_path)
    assert ours["error"] == section["error"] == peer["skipped"] == "ValueError: no good"
    assert peer["error"] is None and good["values"] == {"us": 1.0, "odd": "nan"}
    assert record.finish() == 1


def test_a_measurement_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    def sleep() -> dict[str, Any]:
        try:
            time.sleep(30)
        except Exception:
            pytest.fail("libraries would swallow it")
        return {}

    result = recorder(tmp_path).measure("decode", "slow", sleep, cap=0.1)
    assert result.skipped is not None and "out of time" in result.skipped


def test_errors_are_judged_row_by_row_against_the_dtype(tmp_path: Path) -> None:
    this = Bench(recorder(tmp_path), TOY_SIZES, torch.device("cpu"))
    case = Case("decode", torch.float32, (16, 16), 2, 1, 16, (5, 0, 20), (1, 0, 1))
    for change, words in (
        (lambda out: out, None),
        (lambda out: out + 1e-3, "row 1 is not zero"),
        (lambda out: out * (1 + 1e-2), "error; root mean square"),
        (lambda out: out.index_fill(0, torch.tensor([2]), float("nan")), "NaN"),
    ):
        rows = Rows.attend
        try:
            Rows.attend = lambda self, change=change, rows=rows: change(rows(self))
            result = correctness.check_attention(this, case)
        finally:
            Rows.attend = rows
        assert result.passed is (words is None)
        assert words is None or words in result.values["wrong"]


def test_the_cases_for_a_gpu_cover_what_they_should() -> None:
    cases = correctness_cases(GPU_SIZES)
    names = [case.name for case in cases] + [name for name, _, _ in correctness.other_cases(GPU_SIZES)]
    assert len(names) == len(set(names)) <= 40
    for kind in ("decode", "prefill"):
        ours = [case for case in cases if case.kind == kind]
        assert {case.dims for case in ours} == set(DIMS)
        assert {case.dtype for case in ours} == {torch.bfloat16, torch.float16, torch.float32}
        assert {case.block_size for case in ours} == {16, 32, 64, 128, 256}
        assert {case.group for case in ours} >= {1, 4, 7, 16}
        assert {word for case in ours for word in case.options.split()} == {"window", "softcap", "sinks", "alibi"}
    assert {case.group for case in cases} == {1, 4, 7, 16, 64}
    assert {max(case.new) for case in cases if case.kind == "decode"} == {1, 2, 5, 16}


def test_a_process_that_dies_is_started_again_behind_what_it_died_of(tmp_path: Path) -> None:
    # A stand-in for the measuring process: dies in its second measurement the first time, then ends well.
    program = f"""
import os, sys, time
from pathlib import Path
from hf_paged.bench.gpu.recorder import Recorder
record = Recorder(Path({str(tmp_path)!r}), time.time() + 60, resume="--resume" in sys.argv)
record.measure("decode", "one", lambda: {{"us": 1.0}})
record.measure("decode", "two", lambda: os._exit(9))
record.measure("decode", "three", lambda: {{"us": 3.0}})
sys.exit(record.finish())
"""
    assert supervisor.supervise([sys.executable, "-c", program], tmp_path, time.time() + 60) == 1
    one, two, three = results_in(tmp_path)
    assert one["values"] == {"us": 1.0} and three["values"] == {"us": 3.0}
    assert two["error"] == "the process died with exit code 9"


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.0)
    recorder(tmp_path).write()
    program = f"""
import json, time
from pathlib import Path
state = {{"about": {{}}, "running": ["decode", "stuck"], "finished": False, "results": []}}
Path({str(tmp_path / "gpu.json")!r}).write_text(json.dumps(state))
time.sleep(60)
"""
    began = time.time()
    assert supervisor.supervise([sys.executable, "-c", program], tmp_path, began + 2) == 1
    assert time.time() - began < 20
    (result,) = results_in(tmp_path)
    assert result["name"] == "stuck" and "no end" in result["error"]
    assert "stuck" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--only", "speed"], ["--only", ""]])
def test_unknown_sections_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "correctness, decode" in capsys.readouterr().err
