"""What a call of the Triton kernels costs the host, with a driver that launches nothing: any machine can measure it.

Run by itself (`python -m hf_paged.bench.launch`) it prints JSON. It takes a process of its own, since Triton keeps the
driver it began with. The driver's own part of a launch, a few microseconds of C, is not in the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

CALLS, ROUNDS = 1000, 7
ROWS, LENGTH, HEADS, KV_HEADS, DIM = 8, 4096, 32, 8, 128


def measure_launches() -> dict[str, float]:
    """Host microseconds of one call: storing a step's tokens, decode in one piece, and decode in several, which takes
    two launches.

    Raises:
        RuntimeError: Triton is missing or broken here.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"the launches of Triton's kernels cannot be measured: {lines[-1] if lines else ''}")
    return json.loads(done.stdout.splitlines()[-1])


class _NullDriver:
    """Compiles for an H100 and launches nothing."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *arguments: (1, 1, 0, 0, 1024),
            unload_module=lambda *arguments: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132},
        )

    def launcher_cls(self, *arguments: Any) -> Any:
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _measure() -> dict[str, float]:
    from triton.runtime import driver

    from hf_paged.kernels import gpu
    from hf_paged.kernels.triton_config import Target
    from hf_paged.plan import GroupPlan
    from hf_paged.storage import LayerStorage

    driver.set_active(_NullDriver())
    gpu.target_of = lambda device: Target("sm_90", 132)
    dtype, blocks = torch.bfloat16, LENGTH // 16
    storage = LayerStorage(ROWS * blocks, 16, KV_HEADS, DIM, DIM, dtype, dtype, torch.device("cpu"))
    table = torch.arange(ROWS * blocks, dtype=torch.int32).view(ROWS, blocks)
    lengths = torch.full((ROWS,), LENGTH, dtype=torch.int32)
    plan = GroupPlan(table, lengths, lengths[:, None] - 1, LENGTH)
    query = torch.zeros(ROWS, 1, HEADS, DIM, dtype=dtype).transpose(1, 2)  # as a model lays it out
    key = torch.zeros(ROWS, 1, KV_HEADS, DIM, dtype=dtype).transpose(1, 2)
    calls = {
        "write_us": lambda: gpu.write(storage, key, key, plan),
        "decode_us": lambda: gpu.decode(query, storage, plan, scale=0.1, splits=1),
        "decode_split_us": lambda: gpu.decode(query, storage, plan, scale=0.1, splits=4),
    }
    fastest = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            fastest[name] = min(fastest[name], (time.perf_counter() - began) / CALLS * 1e6)
    return {name: round(seconds, 2) for name, seconds in fastest.items()}


if __name__ == "__main__":
    print(json.dumps(_measure()))
