"""The command line: this process supervises, and starts itself again with `--worker` to measure."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hf_paged.bench import gpu
from hf_paged.bench.gpu.supervisor import supervise
from hf_paged.bench.gpu.worker import CHOICES, work

DEFAULT_BUDGET = 420.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        return work(options)
    command = [sys.executable, "-m", "hf_paged.bench.gpu", "--worker", "--output", str(options.output)]
    command += ["--budget", str(options.budget), "--deadline", str(options.deadline)]
    if options.only:
        command += ["--only", ",".join(options.only)]
    # For the process that measures: Triton has been imported in this one, and then it is too late.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if options.toy:
        command.append("--toy")
        environment["TRITON_INTERPRET"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return supervise(command, options.output, options.deadline, environment)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hf_paged.bench.gpu", description=gpu.__doc__.split("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-results"), metavar="DIR", help="folder for the results"
    )
    parser.add_argument("--toy", action="store_true", help="toy size, on a CPU in Triton's interpreter")
    parser.add_argument("--only", type=_choices, metavar="SECTION,...", help=f"some of {', '.join(CHOICES)}")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET, metavar="SECONDS", help="no measurement begins after that long"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.deadline is None:
        options.deadline = time.time() + options.budget
    return options


def _choices(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CHOICES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(CHOICES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
