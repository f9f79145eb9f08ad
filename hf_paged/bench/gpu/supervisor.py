"""The process that watches over the one that measures: starts it again where it dies, ends it where it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hf_paged.bench.gpu.recorder import DEVICE_LOST, Recorder
from hf_paged.bench.gpu.results import Result

GRACE = 40.0  # seconds behind the budget after which a process that hangs is ended
RESTARTS = 6


def supervise(command: Sequence[str], folder: Path, deadline: float, environment: dict[str, str] | None = None) -> int:
    """Run the measuring process, and start it again where it dies, behind the measurement that it died of.

    Args:
        command: takes `--resume` at its end.

    Returns:
        The exit code.
    """
    path = folder / "gpu.json"
    path.unlink(missing_ok=True)
    resume: list[str] = []
    for _ in range(RESTARTS + 1):
        process = subprocess.Popen([*command, *resume], env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=max(1.0, deadline + GRACE - time.time()))
        except subprocess.TimeoutExpired:
            _end(process)
            return _record_death(folder, deadline, f"no end {GRACE:.0f} s behind the time budget").finish()
        except BaseException:
            _end(process)
            raise
        if not path.exists() or json.loads(path.read_text(encoding="utf-8"))["finished"]:
            return code if code >= 0 else 1
        reason = "the device was lost" if code == DEVICE_LOST else f"the process died with exit code {code}"
        recorder = _record_death(folder, deadline, reason)
        if recorder.remaining <= 0:
            return recorder.finish()
        resume = ["--resume"]
    return recorder.finish()


def _record_death(folder: Path, deadline: float, reason: str) -> Recorder:
    """Note of what a process died; when the device is lost, the measurement has recorded its own error already."""
    recorder = Recorder(folder, deadline, resume=True)
    if recorder.running:
        section, name = recorder.running
        recorder.add(Result(section, name, error=reason))
    return recorder


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which are in its session."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
