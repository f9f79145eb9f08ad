"""The doctor: that it finds what is wrong, names it, and says what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_paged import use_backend
from hf_paged.doctor import Finding, Status, backends, correctness, environment, run_doctor
from hf_paged.doctor.environment import (
    judge_extra,
    judge_kernels,
    judge_no_gpu,
    judge_numba,
    judge_numba_cache,
    judge_threads,
    judge_transformers,
    judge_triton,
)
from hf_paged.kernels import reference, select

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def fresh_backends() -> Iterator[None]:
    """Backends are looked up anew, before and after."""
    for lookup in (select._load, select._default_for):
        lookup.cache_clear()
    yield
    for lookup in (select._load, select._default_for):
        lookup.cache_clear()


@pytest.mark.smoke
def test_a_machine_that_runs_these_tests_is_well() -> None:
    told: list[str] = []
    diagnosis = run_doctor(told.append)
    assert diagnosis.passed, [finding for finding in diagnosis.findings if finding.status is Status.failed]
    assert len(told) == len(diagnosis.sections) == 7 and all(diagnosis.sections.values())
    found = {finding.name: finding for finding in diagnosis.findings}
    for name in ("cpu on cpu", "reference on cpu"):
        assert "float32, bfloat16, float16" in found[name].text, found[name]
    assert found["tiny Llama on cpu"].status is Status.ok


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError("no such library")

    monkeypatch.setattr("hf_paged.doctor.SECTIONS", (("devices", broken),))
    diagnosis = run_doctor()
    assert not diagnosis.passed
    assert diagnosis.findings[0].text == "OSError: no such library"


# Correctness -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_triton_kernels_are_checked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which gets bfloat16 wrong."""
    pytest.importorskip("triton")
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32, torch.float16))
    finding = correctness.check_backend("triton", CPU)
    assert finding.status is Status.ok and "float32, float16" in finding.text, finding


def spoil_write(storage, key, value, plan, write=reference.write):
    write(storage, key, value, plan)
    storage.value_blocks[plan.block_table[1, 0].long(), 0, 3, 0] += 1


def spoil_prefill(*args, attend=reference.prefill, **options):
    return attend(*args, **options) * 1.001


def spoil_decode(*args, attend=reference.decode, **options):
    return attend(*args, **options | {"window": None})


def spoil_copy(storage, pairs, copy=reference.copy_blocks):
    copy(storage, [(source + 1, target) for source, target in pairs])


def break_off(*args, **options):
    raise RuntimeError("a long story\nno kernel image is available")


@pytest.mark.parametrize(
    ("name", "spoiled", "words"),
    [
        ("write", spoil_write, "storing row 1"),
        ("prefill", spoil_prefill, "prefill of row"),
        ("decode", spoil_decode, "decode of row 1 {'window': 9"),
        ("copy_blocks", spoil_copy, "copying a block"),
        ("decode", break_off, "RuntimeError: no kernel image is available"),
    ],
)
def test_kernels_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch, name: str, spoiled, words: str) -> None:
    monkeypatch.setattr(reference, name, spoiled)
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32,))
    finding = correctness.check_backend("reference", CPU)
    assert finding.status is Status.failed and words in finding.text, finding
    assert "HF_PAGED_BACKEND" in finding.advice


def test_a_model_that_answers_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference, "decode", lambda *args, decode=reference.decode, **options: -decode(*args, **options)
    )
    with use_backend("reference"):
        finding = correctness.check_model(CPU)
    assert finding.status is Status.failed and "where the ordinary cache gives" in finding.text, finding


def test_a_model_that_breaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "decode", break_off)
    with use_backend("reference"):
        finding = correctness.check_model(CPU)
    assert finding.status is Status.failed and "no kernel image" in finding.text


# Which kernels run -------------------------------------------------------------------------------------------------


def test_the_kernels_of_a_device_are_named() -> None:
    (cpu,) = [finding for finding in backends.check_backends() if finding.name == "cpu"]
    assert cpu.status is Status.ok and cpu.text == "kernels compiled by numba, for float32, bfloat16, float16"


def test_kernels_that_cannot_be_imported_are_told_of(monkeypatch: pytest.MonkeyPatch, fresh_backends: None) -> None:
    for name in ("cpu", "triton"):
        monkeypatch.setitem(select.BACKENDS, name, "hf_paged.kernels.no_such_module")
    cpu, triton = backends.check_backends()
    assert cpu.status is Status.warning and "the reference, plain torch" in cpu.text and "numba" in cpu.advice
    assert "cannot be imported: ModuleNotFoundError" in cpu.text
    assert triton.status is Status.note and "cannot be imported" in triton.text
    assert correctness.check_backend("cpu", CPU).status is Status.warning


def test_a_forced_backend_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "reference")
    forced, cpu, _ = backends.check_backends()
    assert forced.status is Status.warning and "unset HF_PAGED_BACKEND" in forced.advice
    assert cpu.status is Status.ok and cpu.text.endswith("forced")


def test_a_forced_backend_that_does_not_exist_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "nonsense")
    (forced,) = backends.check_backends()
    assert forced.status is Status.failed and "reference, cpu, triton" in forced.text


# Versions and surroundings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "status"),
    [
        *((None, "failed"), ("4.57.1", "failed"), ("5.16.2", "failed"), ("6.0.0", "failed"), ("5.25.0", "warning")),
        *(("5.17.0", "ok"), ("5.24.0", "ok"), ("5.24.3", "ok")),
    ],
)
def test_transformers_must_be_one_that_was_tested(version: str | None, status: str) -> None:
    finding = judge_transformers(version)
    assert finding.status == status
    assert ("pip install" in finding.advice) == (status != "ok")


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (name for name in project["dependencies"] if name.startswith("transformers"))
    allowed = SpecifierSet(wanted.removeprefix("transformers"))
    for version in ("5.16.9", "5.17.0", "5.24.0", "5.99.0", "6.0.0"):
        assert (judge_transformers(version).status is not Status.failed) == (Version(version) in allowed), version
    oldest = ".".join(map(str, environment.OLDEST_PYTHON))
    assert project["requires-python"] == f">={oldest}"
    (wanted,) = (name.split(";")[0] for name in project["dependencies"] if name.startswith("triton"))
    assert wanted == f"triton>={environment.OLDEST_TRITON}"


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (judge_triton("3.9.0", "linux", True), "ok", "3.9.0"),
        (judge_triton("3.1.0", "linux", True), "warning", "older than 3.6"),
        (judge_triton(None, "linux", True), "warning", "the dense way"),
        (judge_triton(None, "linux", False), "note", "only GPUs need it"),
        (judge_numba(None), "warning", "slow"),
        (judge_no_gpu(None, None, {}), "ok", "none"),
        (judge_no_gpu("13.0", None, {"CUDA_VISIBLE_DEVICES": ""}), "warning", "CUDA_VISIBLE_DEVICES=''"),
        (judge_no_gpu(None, "nvidia-smi", {}), "warning", "built for CPUs"),
        (judge_no_gpu("13.0", "nvidia-smi", {}), "warning", "torch sees none"),
        (judge_threads(8, 8, {}), "ok", "8 of 8"),
        (judge_threads(4, 8, {"OMP_NUM_THREADS": "4"}), "ok", "4 of 8"),  # one a core, where cores have two threads
        (judge_threads(1, 2, {"OMP_NUM_THREADS": "1"}), "warning", "1 of 2 CPUs"),
        (judge_threads(64, 2, {}), "warning", "64 threads on 2 CPUs"),
        (judge_numba_cache(True, "x"), "ok", "kept"),
        (judge_numba_cache(False, "/there"), "warning", "/there cannot be used"),
        (judge_extra("gguf", "the demo", "pip install it", None), "note", "for the demo"),
        (judge_extra("gguf", "the demo", "pip install it", "1.0"), "ok", "1.0"),
    ],
)
def test_what_is_found_is_judged(finding: Finding, status: str, words: str) -> None:
    assert finding.status == status and words in finding.text, finding


def test_a_module_that_hides_the_kernels_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = environment.check_surroundings()[0]
    assert before.status is Status.ok
    (tmp_path / "kernels.py").write_text("")
    after = environment.check_surroundings()[0]
    assert after.status is Status.warning and str(tmp_path / "kernels.py") in after.text


def test_our_own_folder_hides_nothing_while_it_has_no_init(tmp_path: Path) -> None:
    folder = ROOT / "kernels"
    assert judge_kernels(folder, None, None).status is Status.ok
    (tmp_path / "triton_decode.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    assert judge_kernels(tmp_path / "__init__.py", None, None).status is Status.warning
    assert judge_kernels(tmp_path / "__init__.py", tmp_path, "0.17").status is Status.ok  # Hugging Face's library


def test_without_compilation_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    (finding,) = (found for found in environment.check_surroundings() if found.name == "numba's cache")
    assert finding.status is Status.failed


def test_variables_are_suspected_before_a_report_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(correctness, "_tiny_llama", fails)
    assert "please report" in correctness.check_model(CPU).advice
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "nonsense")
    assert correctness.check_model(CPU).advice.startswith("unset HF_PAGED_BACKEND, and see")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert "HF_PAGED_BACKEND and NUMBA_DISABLE_JIT" in correctness.check_model(CPU).advice
