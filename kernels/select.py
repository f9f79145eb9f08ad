"""Which backend serves a device. Backends are modules with the same functions; see this folder's README."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger("hf_paged")

BACKENDS = {"reference": "hf_paged.kernels.reference", "cpu": "hf_paged.kernels.cpu"}
ENVIRONMENT_VARIABLE = "HF_PAGED_BACKEND"

_forced: str | None = None


class Backend(Protocol):
    """What a backend module offers. Shapes are those of `hf_paged.kernels.reference`."""

    name: str

    def unsupported(self, query_dtype: torch.dtype, storage: Any) -> str | None: ...
    def write(self, storage: Any, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None: ...
    def decode(self, query: torch.Tensor, storage: Any, plan: Any, **options: Any) -> torch.Tensor: ...
    def prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, storage: Any, plan: Any, **options: Any
    ) -> torch.Tensor: ...
    def copy_blocks(self, storage: Any, pairs: list[tuple[int, int]]) -> None: ...


def backend_for(device: torch.device, dtype: torch.dtype, storage: Any) -> Backend:
    """The backend for a layer: the one forced by `use_backend` or the environment variable `HF_PAGED_BACKEND`, else
    the compiled one on a CPU if it serves the layer's dtypes, else the reference.

    A layer asks once, when it first stores something.

    Raises:
        ValueError: the environment variable names no backend.
    """
    name = _forced or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={name!r} names no backend; there are {', '.join(BACKENDS)}")
        preferred = _load(name)
    else:
        preferred = _default_on_cpu() if device.type == "cpu" else _load("reference")
    return preferred if preferred.unsupported(dtype, storage) is None else _load("reference")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend for the caches first used within, for tests and comparisons.

    Raises:
        ValueError: there is no such backend.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@cache
def _load(name: str) -> Backend:
    return importlib.import_module(BACKENDS[name])


@cache
def _default_on_cpu() -> Backend:
    try:
        return _load("cpu")
    except ImportError as error:
        logger.warning("the compiled CPU kernel cannot be used (%s); the slow reference runs instead", error)
        return _load("reference")
