"""Runs one measurement after the other, within its time, and keeps on disk what became of each."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hf_paged.bench.gpu.results import Result, Target, markdown, plain

DEVICE_LOST = 75  # exit code of a process whose device answers no more, and will not before the process has ended


class Skip(Exception):
    """Raised by a measurement that cannot be made here; the text says why."""


class OutOfTime(BaseException):
    """Raised in a measurement that takes too long. No `Exception`, for libraries swallow those."""


class Recorder:
    """Holds the results, and writes them to `gpu.json` after each.

    Args:
        deadline: `time.time()` at which no further measurement begins.
        resume: go on with what an earlier process has written.
        device: that measurements run on; None in a process that makes none there.
    """

    def __init__(
        self, folder: Path, deadline: float, *, resume: bool = False, device: torch.device | None = None
    ) -> None:
        self.folder, self.deadline, self.device = folder, deadline, device
        self.results: list[Result] = []
        self.about: dict[str, Any] = {}
        self.running: list[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if resume:
            self._load()

    @property
    def remaining(self) -> float:
        """Seconds."""
        return self.deadline - time.time()

    @property
    def failed(self) -> bool:
        return any(result.error is not None or result.passed is False for result in self.results)

    def find(self, section: str, name: str) -> Result | None:
        return next((r for r in self.results if (r.section, r.name) == (section, name)), None)

    def value(self, section: str, name: str, key: str) -> Any:
        """A figure that was recorded, or None."""
        result = self.find(section, name)
        return None if result is None else result.values.get(key)

    def add(self, result: Result) -> Result:
        self.running = None
        self.results.append(result)
        print(result, flush=True)
        self.write()
        return result

    def skip(self, section: str, name: str, reason: str) -> None:
        if self.find(section, name) is None:
            self.add(Result(section, name, skipped=reason))

    def measure(
        self,
        section: str,
        name: str,
        function: Callable[[], Result | dict[str, Any]],
        *,
        peer: bool = False,
        cap: float = 90.0,
    ) -> Result:
        """Run a measurement and record what becomes of it.

        Args:
            function: returns the figures, or a `Result` whose section and name are filled in here.
            peer: not of this project: its errors are reasons to skip it.
            cap: seconds that it may take.
        """
        done = self.find(section, name)
        if done is not None:
            return done
        if self.remaining <= 0:
            return self.add(Result(section, name, skipped="out of time"))
        self.running = [section, name]
        self.write()
        began = time.perf_counter()
        result = Result(section, name)
        broken = False
        try:
            with time_limit(min(cap, self.remaining + 10)):
                got = function()
            result = (
                replace(got, section=section, name=name) if isinstance(got, Result) else replace(result, values=got)
            )
        except Skip as reason:
            result.skipped = str(reason)
        except OutOfTime:
            result.skipped = f"out of time after {time.perf_counter() - began:.0f} s"
        except Exception as error:
            text, broken = describe_error(error), True
            if peer:
                result.skipped = text
            else:
                result.error = text
        result.seconds = round(time.perf_counter() - began, 3)
        self.add(result)
        self._let_go(broken)
        return result

    def section(self, name: str, function: Callable[[], object]) -> None:
        """Run a section; what it raises itself is recorded too."""
        try:
            function()
        except Exception as error:
            self.add(Result(name, "the section itself", error=describe_error(error)))
            self._let_go(True)

    def write(self, *, finished: bool = False) -> None:
        state = {
            "about": self.about,
            "running": self.running,
            "finished": finished,
            "results": [asdict(result) for result in self.results],
        }
        _replace_file(self.folder / "gpu.json", json.dumps(plain(state), indent=1, allow_nan=False) + "\n")

    def finish(self) -> int:
        """Write and print the table.

        Returns:
            The exit code.
        """
        self.write(finished=True)
        table = markdown(self.about, self.results)
        _replace_file(self.folder / "gpu.md", table)
        print("\n" + table, end="", flush=True)
        return 1 if self.failed else 0

    def _let_go(self, broken: bool) -> None:
        """Free what a measurement left; after an error see whether the device is still there."""
        if self.device is None or self.device.type != "cuda":
            return
        try:
            if broken:
                gc.collect()
                torch.cuda.synchronize()
                torch.ones(8, device=self.device).sum().item()
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"the device is lost: {describe_error(error)}", flush=True)
            raise SystemExit(DEVICE_LOST) from None

    def _load(self) -> None:
        try:
            state = json.loads((self.folder / "gpu.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.about, self.running = state["about"], state["running"]
        for entry in state["results"]:
            target = entry.pop("target")
            self.results.append(Result(**entry, target=Target(**target) if target else None))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside after that long, where the system and the thread allow it."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"


def _replace_file(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
