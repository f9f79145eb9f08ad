"""What the machine is, how fast it copies and reads, and which of torch's kernels it has for block tables."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.peers import Varlen
from hf_paged.bench.harness import describe_machine


def measure_machine(bench: Bench) -> None:
    recorder, size = bench.recorder, bench.sizes.copy_bytes

    def copy() -> dict[str, Any]:
        source = torch.ones(size, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        return {"bytes": size, "gb_per_s": 2 * size / bench.median_seconds(lambda: target.copy_(source)) / 1e9}

    def read() -> dict[str, Any]:
        source = torch.ones(size // 4, dtype=torch.float32, device=bench.device)
        return {"bytes": size, "gb_per_s": size / bench.median_seconds(source.sum) / 1e9}

    recorder.measure("machine", "copy", copy)
    recorder.measure("machine", "read (torch's sum)", read)
    recorder.measure("machine", "varlen_attn", lambda: Varlen.probe(bench), peer=True)


def describe_device(bench: Bench) -> dict[str, Any]:
    """The machine, its GPU and the versions of what runs."""
    machine = describe_machine()
    about: dict[str, Any] = {"machine": str(machine), "toy": not bench.on_gpu, "versions": dict(machine.versions)}
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        about |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return about
