"""What every section is given: the recorder, the sizes, and the device with its clock, its graphs and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from hf_paged.bench.gpu.recorder import Recorder, Skip
from hf_paged.bench.gpu.sizes import Sizes

MEMORY_SHARE = 0.4  # of the free memory, that the keys and values of a timing may take


@dataclass
class Bench:
    """The recorder, the sizes and the device of a run."""

    recorder: Recorder
    sizes: Sizes
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def kernels(self) -> ModuleType:
        """The Triton backend; imported late, so that this module can be imported without Triton."""
        import hf_paged.kernels.gpu as backend

        return backend

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def median_seconds(self, call: Callable[[], object]) -> float:
        """The device's time for `call`; what the host takes counts where the device waits for it."""
        if not self.on_gpu:
            times = []
            for _ in range(self.sizes.repeats):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            return statistics.median(times)
        for _ in range(3):
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.sizes.repeats)]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3

    def graph(self, call: Callable[[], object]) -> Callable[[], object]:
        """`call` as a CUDA graph, after a warm-up on a stream of its own; on a CPU `call` itself."""
        if not self.on_gpu:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def layers_for(self, nbytes: int) -> int:
        """How many layers of `nbytes` must take turns, so that none finds its bytes in the cache.

        Raises:
            Skip: together they take too much of the memory that is free.
        """
        needed = self.sizes.rotation_bytes
        if self.on_gpu:
            needed = max(needed, 2 * torch.cuda.get_device_properties(self.device).L2_cache_size)
        count = max(1, min(self.sizes.max_layers, -(-needed // nbytes)))
        if self.on_gpu and count * nbytes > MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0]:
            raise Skip(f"{count * nbytes / 1e9:.1f} GB of K/V are more than {MEMORY_SHARE:.0%} of the free memory")
        return count

    def transfer_figures(self, nbytes: int, seconds: float) -> dict[str, Any]:
        """Of a call that moves or reads so many bytes."""
        copy = self.recorder.value("machine", "copy", "gb_per_s")
        gb_per_s = nbytes / seconds / 1e9
        return {"us": seconds * 1e6, "gb_per_s": gb_per_s, "share_of_copy": gb_per_s / copy if copy else None}

    def prefill_figures(self, rows: int, length: int, seconds: float) -> dict[str, Any]:
        """Of a prefill of `rows` prompts of `length` tokens."""
        return {"ms": seconds * 1e3, "tflop_per_s": rows * self.sizes.layer.flops(length) / seconds / 1e12}
