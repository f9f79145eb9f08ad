"""What must hold of the compiled kernels, checked without a GPU. `hf-paged kernels` shows it.

Compiling happens in other processes, for the compiler can abort; what comes out is kept by a hash of the kernels'
source. Run as a program this file is such a process.
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
from typing import TYPE_CHECKING, Any

from .static_facts import DEVICES, WIDTHS, Case, Facts, facts_of
from .triton_config import Config, parts

if TYPE_CHECKING:
    from rich.console import Console

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
    wide = min((_wide_loads(loop) for loop in facts.loads), default=0)
    opcodes = {opcode for loop in facts.loads for opcode in loop}
    tile_bytes = (
        facts.tile * size * sum(part for dim in (case.key_dim, value_dim) for part in parts(dim, size, device.target))
    )
    needed = tile_bytes / (16 * (32 if nvidia else 64) * facts.warps)
    if wide < needed:
        found.append(f"{wide} loads of 16 bytes in the loop, a tile needs {needed:g}")
    if narrow := [opcode for opcode in opcodes if opcode.startswith("LDGSTS") and not opcode.endswith("128")]:
        found.append(f"asynchronous copies of less than 16 bytes: {', '.join(narrow)}")
    if nvidia and max(case.key_dim, value_dim) <= 128:
        if plain := [opcode for opcode in opcodes if opcode.startswith("LDG.") and opcode.endswith("128")]:
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


def _wide_loads(loop: dict[str, int]) -> int:
    """Loads of 16 bytes a thread in a loop."""
    return sum(count for opcode, count in loop.items() if opcode.endswith(("128", "x4")))


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


def missing_tool(cases: Iterable[Case]) -> str | None:
    """What these cases need and this machine lacks, in words that say what to do; None if nothing."""
    if any(DEVICES[case.target].target.is_nvidia for case in cases):
        from triton import knobs

        for tool in ("ptxas", "cuobjdump"):
            try:
                getattr(knobs.nvidia, tool).path  # noqa: B018  it is looked for when asked
            except (RuntimeError, AttributeError):
                return (
                    f"{tool} is missing, which NVIDIA targets need. Triton's wheels bring it: reinstall triton, set "
                    f"TRITON_{tool.upper()}_PATH to a CUDA toolkit's, or choose another --target, such as gfx942"
                )
    return None


def source_hash() -> str:
    """Of all that decides what comes out: the kernels, how they are cut and read, and the compiler."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name.startswith("triton_") or path.name in ("gpu.py", "static_facts.py"):
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
    command = [sys.executable, "-m", "hf_paged.kernels.static_guard"]
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


# Showing it -------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("kernel", "target", "use", "queries x tile", "warps", "stages", "buffers", "registers", "shared"),
    *("16-byte loads", "matrix", "instructions a token", "issue slots", "holds"),
)


def verdict(case: Case, outcome: Facts | str) -> list[str]:
    """What does not hold, in words; empty if all does."""
    return [outcome] if isinstance(outcome, str) else faults(case, outcome)


def as_dict(case: Case, outcome: Facts | str, found: list[str]) -> dict[str, Any]:
    facts = None if isinstance(outcome, str) else asdict(outcome)
    return {"case": asdict(case), "facts": facts, "faults": found}


def table_row(case: Case, outcome: Facts | str, found: list[str]) -> tuple[str, ...]:
    """A row of text, as `COLUMNS`."""
    use = str(case).split(" ", 2)[2]
    holds = "; ".join(found) or "yes"
    if isinstance(outcome, str):
        return (case.kernel, case.target, use, *[""] * 10, holds)
    size = f"{outcome.shared / 1024:.0f} KiB"
    if case.kernel not in ("decode", "prefill"):
        sizes = ("", f"{outcome.warps}", "", "", f"{outcome.registers}", size)
        return (case.kernel, case.target, use, *sizes, *[""] * 4, holds)
    model = ("", "")
    if case.kernel == "decode":
        model = (f"{outcome.per_token:.1f}", f"{outcome.issue_share:.2f}")
    return (
        *(case.kernel, case.target, use, f"{outcome.m} x {outcome.tile}", f"{outcome.warps}", f"{outcome.stages}"),
        *(f"{outcome.buffers}", f"{outcome.registers}", size, f"{min(map(_wide_loads, outcome.loads))}"),
        *(" ".join(f"{count} {name}" for name, count in outcome.matrix.items()), *model, holds),
    )


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_table(results: Iterable[tuple[Case, Facts | str, list[str]]], console: Console) -> None:
    """The table for a terminal: its main columns, and what does not hold below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="dim", box=None, pad_edge=False)
    for column in ("kernel", "target", "use", "cut", "regs", "KiB", "a token", "slots", ""):
        words = column in ("kernel", "target", "use", "cut", "")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "use")
    bad = []
    for case, outcome, found in results:
        row = dict(zip(COLUMNS, table_row(case, outcome, found), strict=True))
        cut = ", ".join(row[name] for name in ("queries x tile", "warps", "stages") if row[name])
        table.add_row(
            *(row["kernel"], row["target"], row["use"], cut, row["registers"], row["shared"].removesuffix(" KiB")),
            *(row["instructions a token"], row["issue slots"], "[red]✗[/]" if found else "[green]✓[/]"),
        )
        bad += [f"✗ {case}: {row['holds']}"] if found else []
    console.print(table, highlight=False)
    for line in bad:
        console.print(Text(line, "red"))
    console.print(
        "[dim]Compiled, not measured. cut: queries x tokens of a tile, warps, stages. regs: registers a thread, KiB: "
        "shared memory. a token: warp instructions for a token of KV. slots: the share of all issue slots that decode "
        "needs when memory delivers what its data sheet says. --markdown and --json tell more.[/]",
        highlight=False,
    )


if __name__ == "__main__":
    _serve()
