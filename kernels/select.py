"""Which backend serves a device. Backends are modules with the same functions; see this folder's README."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger("hf_paged")

BACKENDS = {
    "reference": "hf_paged.kernels.reference",
    "cpu": "hf_paged.kernels.cpu",
    "triton": "hf_paged.kernels.gpu",
}
DEFAULTS = {"cpu": "cpu", "cuda": "triton"}  # by type of device; ROCm devices are "cuda", too
ENVIRONMENT_VARIABLE = "HF_PAGED_BACKEND"

_forced: str | None = None


class Backend(Protocol):
    """What a backend module offers. Shapes are those of `hf_paged.kernels.reference`."""

    name: str

    def unsupported(self, query_dtype: torch.dtype, storage: Any) -> str | None: ...
    def serves_graphs(self, device: torch.device) -> bool: ...
    def graph_key(self) -> object: ...
    def write(self, storage: Any, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None: ...
    def decode(self, query: torch.Tensor, storage: Any, plan: Any, **options: Any) -> torch.Tensor: ...
    def prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, storage: Any, plan: Any, **options: Any
    ) -> torch.Tensor: ...
    def copy_blocks(self, storage: Any, pairs: list[tuple[int, int]]) -> None: ...


@dataclass(frozen=True)
class StoreOnly:
    """Stands for a backend that cannot serve a layer: keeps its blocks, and has attention go the dense way."""

    reason: str
    name: str = "dense"

    def unsupported(self, query_dtype: torch.dtype, storage: Any) -> str:
        return self.reason

    def serves_graphs(self, device: torch.device) -> bool:
        return False

    def graph_key(self) -> object:
        return None

    def write(self, storage: Any, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        reference().write(storage, key, value, plan)

    def copy_blocks(self, storage: Any, pairs: list[tuple[int, int]]) -> None:
        reference().copy_blocks(storage, pairs)


def backend_for(device: torch.device, dtype: torch.dtype, storage: Any) -> Backend | StoreOnly:
    """The backend for a layer: the one forced by `use_backend` or the environment variable `HF_PAGED_BACKEND`, else
    the fastest of its device.

    Where that does not serve the layer's dtypes or shapes, the reference does on a CPU. On a GPU it would be slower
    than attention over gathered tensors, so there the dense way is taken.

    A layer asks once, when it first stores something.

    Raises:
        ValueError: the environment variable names no backend.
    """
    name = _forced or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={name!r} names no backend; there are {', '.join(BACKENDS)}")
    preferred = _load(name) if name is not None else _default_for(device.type)
    if preferred is None and device.type != "cuda":
        return reference()
    reason = "Triton cannot be used" if preferred is None else preferred.unsupported(dtype, storage)
    if reason is None:
        return preferred
    if device.type == "cuda":
        logger.info("attention over this cache goes the dense way: %s", reason)
        return StoreOnly(reason)
    return reference()


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


def reference() -> Backend:
    """The backend in plain torch, which serves every floating dtype on every device."""
    return _load("reference")


@cache
def _load(name: str) -> Backend:
    return importlib.import_module(BACKENDS[name])


@cache
def _default_for(device_type: str) -> Backend | None:
    name = DEFAULTS.get(device_type)
    try:
        return None if name is None else _load(name)
    except ValueError:  # a setting of ours that cannot be
        raise
    except Exception as error:  # whatever a broken installation raises
        logger.warning("the %s kernels cannot be used, a slower way is taken (%s)", name, error)
        return None
