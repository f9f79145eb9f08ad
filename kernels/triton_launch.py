"""Launching a Triton kernel with little work on the host.

Triton looks at every argument of every launch, constants too, to find the compiled code that fits: 10 to 20 us for the
kernels here, more than a short decode takes on the GPU. What can differ between two launches of a layer is little; it
is made a key here, and what Triton compiled for it is launched directly.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton import knobs


class Launcher:
    """A kernel with its constants, on one device.

    Args:
        function: the kernel, its constants the last of its parameters.
        constants: their values by name; names that the kernel does not have are left out.
        device: where it runs. Triton launches on the current device, which with a model that is spread over several
            may be another.
        options: the compiler's, `num_warps` and so on.
    """

    __slots__ = ("_compiled", "_constants", "_device", "_function", "_options")

    def __init__(self, function: Any, constants: dict[str, Any], device: torch.device, **options: Any) -> None:
        names = function.arg_names
        self._constants = tuple(constants[name] for name in names if name.isupper())
        assert all(name.isupper() for name in names[len(names) - len(self._constants) :])
        self._function = function
        self._device = device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self._options = {**options, "enable_fp_fusion": True}
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch.

        Args:
            key: whatever Triton looks at in `arguments` and may change from launch to launch: whether addresses are
                multiples of 16, integers that are not exempt from it, and dtypes.
            grid: programs in three dimensions.
            arguments: the kernel's, but for its constants.
        """
        if self._device is not None and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(key, grid, *arguments)
        kernel = self._compiled.get(key)
        if kernel is not None:
            kernel[grid](*arguments, *self._constants)
        else:
            kernel = self._function[grid](*arguments, *self._constants, **self._options)
            if not knobs.runtime.interpret:
                self._compiled[key] = kernel
        return None
