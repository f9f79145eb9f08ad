"""Which kernels will run on each device, and why."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

import torch

from hf_paged.doctor.findings import Finding, Status
from hf_paged.kernels import select
from hf_paged.storage import LayerStorage

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORDS = {
    "reference": "the reference, plain torch",
    "cpu": "kernels compiled by numba",
    "triton": "Triton kernels",
    "dense": "the dense way: gathered, then SDPA",
}


def devices() -> list[torch.device]:
    """Those that a model could be on."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for name in ("mps", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available():
            found.append(torch.device(name))
    return found


def check_backends() -> list[Finding]:
    found = []
    forced = judge_forced(os.environ)
    if forced is not None:
        found.append(forced)
        if forced.status is Status.failed:
            return found
    found += [_for_device(device) for device in devices()]
    if not torch.cuda.is_available():
        found.append(_triton_without_gpu())
    return found


def judge_forced(environment: Mapping[str, str]) -> Finding | None:
    """What the environment variable says, if it is set."""
    variable = select.ENVIRONMENT_VARIABLE
    name = environment.get(variable)
    if not name:
        return None
    if name not in select.BACKENDS:
        text = f"{variable}={name!r} names no backend; there are {', '.join(select.BACKENDS)}"
        return Finding("forced", Status.failed, text, f"unset {variable}")
    text = f"{variable}={name}: {WORDS[name]}, wherever it can serve"
    return Finding("forced", Status.warning, text, f"unset {variable} to have the fastest of each device")


def _for_device(device: torch.device) -> Finding:
    serving: dict[str, list[str]] = {}
    reasons: list[str] = []
    preferred = select.DEFAULTS.get(device.type)
    for dtype in DTYPES:
        storage = LayerStorage(1, 16, 1, 64, 64, dtype, dtype, device)
        backend = select.backend_for(device, dtype, storage)
        serving.setdefault(backend.name, []).append(str(dtype).removeprefix("torch."))
        if backend.name != preferred and preferred is not None:
            reasons.append(why_not(preferred, dtype, storage))
    text = "; ".join(f"{WORDS[name]}, for {', '.join(dtypes)}" for name, dtypes in serving.items())
    if not reasons:
        more = "" if preferred else "; there are no kernels for this kind of device"
        return Finding(str(device), Status.ok if preferred else Status.note, text + more)
    if os.environ.get(select.ENVIRONMENT_VARIABLE):
        return Finding(str(device), Status.ok, f"{text}; forced")
    advice = "reinstall numba" if preferred == "cpu" else "reinstall triton, in the version that torch asks for"
    if not any(reason.startswith("cannot be imported") for reason in reasons):
        advice = ""
    return Finding(str(device), Status.warning, f"{text}; {'; '.join(dict.fromkeys(reasons))}", advice)


def _triton_without_gpu() -> Finding:
    try:
        importlib.import_module(select.BACKENDS["triton"])
    except ImportError as error:
        return Finding("triton", Status.note, f"no GPU needs it here, and it cannot be imported: {error}")
    except Exception as error:  # whatever a broken installation raises
        text = f"no GPU needs it here, and it breaks: {type(error).__name__}: {error}"
        return Finding("triton", Status.warning, text, "reinstall triton, in the version that torch asks for")
    text = "can be imported, and there is no GPU to run on; `hf-paged kernels` compiles for GPUs without one"
    return Finding("triton", Status.ok, text)


def why_not(name: str, dtype: torch.dtype, storage: LayerStorage) -> str:
    """Why a backend does not serve a layer."""
    try:
        backend = importlib.import_module(select.BACKENDS[name])
    except Exception as error:  # whatever a broken installation raises
        return f"cannot be imported: {type(error).__name__}: {error}"
    return backend.unsupported(dtype, storage) or "another was asked for"
