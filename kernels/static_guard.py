"""What must hold of the compiled kernels, checked without a GPU.

    python -m hf_paged.kernels.static_guard             the main configurations, as a table
    python -m hf_paged.kernels.static_guard --all       every one (half an hour)

Exit code 1 if something does not hold. Compiling happens in other processes, for the compiler can abort; what comes out
is kept by a hash of the kernels' source.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from .static_facts import DEVICES, WIDTHS, Case, Facts, facts_of
from .triton_config import Config, parts

DIMS = [(dim, dim) for dim in (16, 24, 64, 72, 80, 96, 112, 128, 192, 256)] + [(192, 128)]
TIME_LIMIT = 300  # seconds that one case may take


def main_cases() -> list[Case]:
    """What is checked always: the configuration that most models have on every target, and one of each other kind."""
    cases = [Case(kernel, target) for target in DEVICES for kernel in ("decode", "prefill")]
    cases += [Case(kernel, target) for target in ("sm_90", "gfx942") for kernel in ("combine", "write", "copy")]
    cases += [
        Case("decode", "sm_90", block_size=64),
        Case("decode", "sm_80", key_dim=64, group=3, kv_heads=3),
        Case("decode", "sm_90", group=8, q_len=5),
        Case("decode", "sm_89", key_dim=112, dtype="fp16"),
        Case("decode", "sm_90", dtype="fp32"),
        Case("decode", "sm_90", key_dim=256, options=("softcap", "window")),
        Case("decode", "sm_100", key_dim=64, group=8, options=("sinks", "window")),
        Case("decode", "gfx942", key_dim=80),
        Case("prefill", "sm_90", dtype="fp32"),
        Case("prefill", "sm_90", key_dim=256, options=("softcap", "window")),
        Case("prefill", "sm_100", key_dim=64, group=8, options=("sinks", "window")),
        Case("prefill", "sm_80", key_dim=96, options=("alibi",)),
        Case("prefill", "sm_90", key_dim=192, value_dim=128, group=1),
    ]
    return cases


def all_cases() -> list[Case]:
    cases = main_cases()
    every = ("softcap", "window", "sinks", "alibi")
    for target in DEVICES:
        for dtype in WIDTHS:
            for kernel in ("decode", "prefill"):
                for key_dim, value_dim in DIMS:
                    for options in ((), every):
                        cases.append(Case(kernel, target, dtype, key_dim, value_dim, options=options))
            for group in (1, 8, 16, 64):
                cases.append(Case("decode", target, dtype, group=group))
            for kernel in ("decode", "prefill"):
                for block_size in (32, 64, 128, 256):
                    cases.append(Case(kernel, target, dtype, block_size=block_size))
            cases.append(Case("decode", target, dtype, q_len=16))
            for key_dim, value_dim in DIMS:
                for kernel in ("combine", "write", "copy"):
                    cases.append(Case(kernel, target, dtype, key_dim, value_dim))
    return list(dict.fromkeys(cases))


def faults(case: Case, facts: Facts) -> list[str]:
    """What does not hold of a case, in words; empty if all does."""
    found = []
    device = DEVICES[case.target]
    nvidia = device.target.is_nvidia
    if facts.spilled:
        found.append(f"spills {facts.spilled} bytes a thread")
    if facts.shared > device.shared_limit:
        found.append(f"needs {facts.shared} bytes of shared memory, {device.shared_limit} are there")
    if case.kernel not in ("decode", "prefill"):
        return found

    if not facts.matrix:
        found.append("no matrix instructions")
    value_dim = case.value_dim or case.key_dim
    size = WIDTHS[case.dtype]
    wide = sum(count for opcode, count in facts.loads.items() if opcode.endswith(("128", "x4")))
    tile_bytes = facts.tile * size * sum((*parts(case.key_dim, size), *parts(value_dim, size)))
    needed = tile_bytes / (16 * (32 if nvidia else 64) * facts.warps)
    if wide < needed:
        found.append(f"{wide} loads of 16 bytes in the loop, a tile needs {needed:g}")
    if narrow := [opcode for opcode in facts.loads if opcode.startswith("LDGSTS") and not opcode.endswith("128")]:
        found.append(f"asynchronous copies of less than 16 bytes: {', '.join(narrow)}")
    if nvidia and max(case.key_dim, value_dim) <= 128:
        if plain := [opcode for opcode in facts.loads if opcode.startswith("LDG.") and opcode.endswith("128")]:
            found.append(f"keys or values loaded past the asynchronous copies: {', '.join(plain)}")
        if facts.buffers < 2:
            found.append(f"{facts.buffers} buffer of keys and values")
        if case.kernel == "prefill" and case.target == "sm_90" and case.dtype != "fp32" and "HGMMA" not in facts.matrix:
            found.append("no wgmma")
    if case.kernel == "decode" and (case.dtype, case.key_dim, case.group, case.q_len) == ("bf16", 128, 4, 1):
        limit = {"sm_90": 0.25, "sm_100": 0.5}.get(case.target)
        if limit is not None and facts.issue_share > limit:
            found.append(f"needs {facts.issue_share:.2f} of the issue slots at full memory speed, {limit} are allowed")
        limit = {16: 27, 64: 22}.get(case.block_size)
        if case.target == "sm_90" and limit is not None and not case.options and facts.per_token > limit:
            found.append(f"{facts.per_token:.1f} warp instructions a token, {limit} are allowed")
    return found


# Running ----------------------------------------------------------------------------------------------------------


def run(
    cases: Sequence[Case], jobs: int | None = None, progress: Callable[[int], object] | None = None
) -> list[Facts | str]:
    """The facts of each case, or why there are none.

    Args:
        jobs: processes that compile; by default as many as there are cores.
        progress: told how many cases are done.
    """
    results: dict[int, Facts | str] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    lock = threading.Lock()
    source = source_hash()

    def settle(index: int, outcome: Facts | str) -> None:
        with lock:
            results[index] = outcome
            if progress:
                progress(len(results))

    for index, case in enumerate(cases):
        kept = _kept_at(source, case)
        try:
            settle(index, Facts(**json.loads(kept.read_text())))
        except (OSError, ValueError, TypeError):
            waiting.put(index)

    def compile_waiting() -> None:
        worker: subprocess.Popen[str] | None = None
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.poll() is not None:
                worker = _start_worker()
            outcome = _ask(worker, cases[index])
            if isinstance(outcome, Facts):
                kept = _kept_at(source, cases[index])
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
                part.write_text(json.dumps(asdict(outcome)))
                part.replace(kept)
            settle(index, outcome)
        if worker is not None:
            worker.stdin.close()
            worker.wait()

    count = min(jobs or os.cpu_count() or 1, waiting.qsize())
    threads = [threading.Thread(target=compile_waiting) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(cases))]


def source_hash() -> str:
    """Of all that decides what comes out: the kernels, how they are cut and read, and the compiler."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name.startswith("triton_") or path.name == "static_facts.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _kept_at(source: str, case: Case) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(f"{source} {case!r}".encode()).hexdigest()[:32]
    return root / "hf_paged" / "static_guard" / f"{name}.json"


def _start_worker() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    package = str(Path(sys.modules["hf_paged"].__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "hf_paged.kernels.static_guard", "--serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)


def _ask(worker: subprocess.Popen[str], case: Case) -> Facts | str:
    alarm = threading.Timer(TIME_LIMIT, worker.kill)
    alarm.start()
    try:
        worker.stdin.write(json.dumps(asdict(case)) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    finally:
        alarm.cancel()
    if not answer:
        worker.wait()
        return f"the compiler ended with code {worker.returncode}"
    message = json.loads(answer)
    return Facts(**message["facts"]) if "facts" in message else message["error"]


def _serve() -> None:
    """Compile the cases that come as lines of JSON, and answer with lines of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is not an answer
    for line in sys.stdin:
        fields = json.loads(line)
        fields["options"] = tuple(fields["options"])
        fields["config"] = fields["config"] and Config(**fields["config"])
        try:
            message = {"facts": asdict(facts_of(Case(**fields)))}
        except Exception as error:
            lines = str(error).strip().splitlines()
            message = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
        print(json.dumps(message), file=out, flush=True)


# The table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("kernel", "target", "use", "queries x tile", "warps", "stages", "buffers", "registers", "shared"),
    *("16-byte loads", "matrix", "instructions a token", "issue slots", "holds"),
)


def table_rows(cases: Iterable[Case], outcomes: Iterable[Facts | str]) -> list[tuple[str, ...]]:
    """A row of text for each case, as `COLUMNS`."""
    rows = []
    for case, facts in zip(cases, outcomes, strict=True):
        use = str(case).split(" ", 2)[2]
        if isinstance(facts, str):
            rows.append((case.kernel, case.target, use, *[""] * 10, facts))
            continue
        wide = sum(count for opcode, count in facts.loads.items() if opcode.endswith(("128", "x4")))
        attention = case.kernel in ("decode", "prefill")
        model = (f"{facts.per_token:.1f}", f"{facts.issue_share:.2f}") if case.kernel == "decode" else ("", "")
        rows.append(
            (
                *(case.kernel, case.target, use, f"{facts.m} x {facts.tile}" if attention else ""),
                *(str(facts.warps), str(facts.stages) if attention else "", str(facts.buffers) if attention else ""),
                *(str(facts.registers), f"{facts.shared / 1024:.0f} KiB", str(wide) if attention else ""),
                *(" ".join(f"{count} {name}" for name, count in facts.matrix.items()), *model),
                "; ".join(faults(case, facts)) or "yes",
            )
        )
    return rows


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m hf_paged.kernels.static_guard", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every configuration instead of the main ones")
    parser.add_argument("--target", action="append", choices=list(DEVICES), help="only this target; repeatable")
    parser.add_argument("--kernel", action="append", help="only this kernel; repeatable")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: as many as there are cores)")
    parser.add_argument("--faults", action="store_true", help="only what does not hold")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        _serve()
        return 0
    cases = [
        case
        for case in (all_cases() if options.all else main_cases())
        if (not options.target or case.target in options.target)
        and (not options.kernel or case.kernel in options.kernel)
    ]

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{len(cases)} compiled", end="", file=sys.stderr, flush=True)

    outcomes = run(cases, options.jobs, progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    rows = table_rows(cases, outcomes)
    failed = [row for row in rows if row[-1] != "yes"]
    print(markdown(failed if options.faults else rows))
    print(f"\n{len(rows)} configurations, {len(failed)} with a fault", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
