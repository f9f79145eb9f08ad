"""The one way in which this project times things.

Variants run in turn in one process, and the order changes every round: what the machine does meanwhile (other work,
heat, clock) falls on all of them alike. Their ratio is taken within each round and then summed up over the rounds, so
that it is steadier than the times it is made of.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

Order = Callable[[Sequence[str], int], list[str]]
"""Names and the number of a round, to the names in the order of that round."""

OUT_OF_CACHE = 256 << 20  # bytes to go round in, more than CPU caches hold


@dataclass(frozen=True)
class Timing:
    """The seconds of one variant, one value a round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def iqr(self) -> float:
        """Spread: the distance between the quartiles."""
        return _iqr(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "median_s": _short(self.median),
            "min_s": _short(self.min),
            "iqr_s": _short(self.iqr),
            "seconds": [_short(s) for s in self.seconds],
        }


@dataclass(frozen=True)
class Ratio:
    """How many times faster `variant` is than `baseline`, one value a round: over 1 means faster."""

    variant: str
    baseline: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def iqr(self) -> float:
        """Spread: the distance between the quartiles."""
        return _iqr(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        return _quartiles(self.values)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "baseline": self.baseline,
            "median": _short(self.median),
            "quartiles": [_short(low), _short(high)],
            "values": [_short(v) for v in self.values],
        }


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured: timings of every variant, and ratios of all but the first to the first."""

    timings: Mapping[str, Timing]
    baseline: str

    def ratio(self, variant: str, baseline: str | None = None) -> Ratio:
        """How many times faster `variant` is than `baseline` (default: the first variant), round by round."""
        baseline = baseline or self.baseline
        base, other = self.timings[baseline].seconds, self.timings[variant].seconds
        return Ratio(variant, baseline, tuple(b / o for b, o in zip(base, other, strict=True)))

    def as_dict(self) -> dict[str, Any]:
        others = [name for name in self.timings if name != self.baseline]
        return {
            "baseline": self.baseline,
            "timings": {name: timing.as_dict() for name, timing in self.timings.items()},
            "times_faster": {name: self.ratio(name).as_dict() for name in others},
        }


def compare(
    variants: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 10,
    warmup: int = 1,
    units: int = 1,
    order: Order | None = None,
    sync: Callable[[], object] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Comparison:
    """Time `variants` against each other; the first is the baseline.

    Args:
        variants: what to run, by name. Each is called once a round, and `warmup` times before the first.
        repeats: rounds that count.
        units: how much work one call does (decode steps, say); timings are per unit.
        order: in which the variants run in a round; `rotated` unless given.
        sync: called before every reading of the clock, such as `torch.cuda.synchronize`.
        progress: told in words where the measurement is, between the calls that are timed.
    """
    if not variants or repeats < 1:
        raise ValueError("compare needs at least one variant and one repeat")
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, repeats):
            if progress:
                progress(f"warming up {index + warmup + 1}/{warmup}" if index < 0 else f"round {index + 1}/{repeats}")
            for name in (order or rotated)(names, index):
                elapsed = _timed(variants[name], sync)
                if index >= 0:
                    seconds[name].append(elapsed / units)
            if was_enabled:
                gc.collect(1)  # between rounds, never inside one; the old generation takes long
    finally:
        if was_enabled:
            gc.enable()
    return Comparison({name: Timing(name, tuple(values)) for name, values in seconds.items()}, names[0])


def rotated(names: Sequence[str], index: int) -> list[str]:
    """`names` in the order of round `index`: each round begins with another one."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def shuffled(names: Sequence[str], index: int) -> list[str]:
    """`names` in an order by lot, the same for every run of round `index`. What a variant leaves behind (idle threads,
    caches) then falls on all others, where by `rotated` it always falls on the next one."""
    return random.Random(f"round {index}").sample(names, len(names))


def synchronizer(device: torch.device | str) -> Callable[[], object] | None:
    """What `compare` needs as `sync` for work on `device`; None where work is done when the call returns."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    backend = getattr(torch, device.type)
    return backend.synchronize


def measure_read_bandwidth(nbytes: int, device: torch.device | str = "cpu", *, repeats: int = 7) -> float:
    """Bytes per second at which `device` reads `nbytes` that lie in one piece: the yardstick for attention in decode.

    Small pieces take turns, so that they come from memory: between two steps, a model's weights go through the caches.
    """
    size = max(nbytes // 4, 1)
    count = max(1, OUT_OF_CACHE // (size * 4))
    pieces = itertools.cycle(torch.ones(count, size, dtype=torch.float32, device=device))
    comparison = compare({"read": lambda: next(pieces).sum()}, repeats=repeats, warmup=2, sync=synchronizer(device))
    return size * 4 / comparison.timings["read"].median


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran: figures mean little without it."""

    cpu: str
    logical_cpus: int
    memory_bytes: int
    accelerator: str | None
    system: str
    threads: int
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "logical_cpus": self.logical_cpus,
            "memory_bytes": self.memory_bytes,
            "accelerator": self.accelerator,
            "system": self.system,
            "threads": self.threads,
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        accelerator = f", {self.accelerator}" if self.accelerator else ""
        return (
            f"{self.cpu}, {self.logical_cpus} CPUs, {self.threads} threads, "
            f"{self.memory_bytes / 2**30:.0f} GiB{accelerator}; {versions}"
        )


def describe_machine() -> Machine:
    """The machine that this process runs on, and the versions of what it runs."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numba", "triton", "hf-paged"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        cpu=_cpu_model(),
        logical_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        system=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        versions=versions,
    )


def _timed(call: Callable[[], object], sync: Callable[[], object] | None) -> float:
    if sync:
        sync()
    start = time.perf_counter()
    call()
    if sync:
        sync()
    return time.perf_counter() - start


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _iqr(values: Sequence[float]) -> float:
    low, high = _quartiles(values)
    return high - low


def _short(value: float) -> float:
    """Six significant digits: more would be noise in the JSON."""
    return float(f"{value:.6g}")
