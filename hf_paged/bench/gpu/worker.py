"""The process that measures: one section after the other."""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hf_paged.bench.gpu.batching import measure_batching
from hf_paged.bench.gpu.blocks import measure_blocks
from hf_paged.bench.gpu.compile import measure_compile
from hf_paged.bench.gpu.correctness import measure_correctness
from hf_paged.bench.gpu.decode import measure_decode, measure_sweep
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.generate import measure_generate
from hf_paged.bench.gpu.machine import describe_device, measure_machine
from hf_paged.bench.gpu.prefill import measure_prefill
from hf_paged.bench.gpu.recorder import Recorder, describe_error
from hf_paged.bench.gpu.results import SECTIONS
from hf_paged.bench.gpu.sizes import GPU_SIZES, TOY_SIZES

CHOICES = ("correctness", "decode", "prefill", "blocks", "generate", "batching")
WITH = {"decode": ("decode", "sweep")}  # what a choice stands for, besides what always runs
ALWAYS = ("machine", "compile")


def work(options: argparse.Namespace) -> int:
    """Measure in this process.

    Returns:
        The exit code.
    """
    if not options.toy and not torch.cuda.is_available():
        print(
            "hf_paged.bench.gpu: torch sees no CUDA device here; run it where there is one, or with --toy on a CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu") if options.toy else torch.device("cuda", 0)
    recorder = Recorder(options.output, options.deadline, resume=options.resume, device=device)
    bench = Bench(recorder, TOY_SIZES if options.toy else GPU_SIZES, device)
    sections = chosen_sections(options.only)
    runs: dict[str, Callable[[Bench], object]] = {
        "machine": measure_machine,
        "compile": partial(measure_compile, sections=sections),
        "correctness": measure_correctness,
        "decode": measure_decode,
        "sweep": measure_sweep,
        "blocks": measure_blocks,
        "prefill": measure_prefill,
        "generate": measure_generate,
        "batching": measure_batching,
    }
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of numpy, in the interpreter
    try:
        recorder.about.update(describe_device(bench))
    except Exception as error:
        recorder.about["machine"] = describe_error(error)
    if bench.on_gpu:
        gc.collect()
        gc.freeze()  # what is imported stays: capturing a graph collects each time
    for section in sections:
        with torch.no_grad():
            recorder.section(section, partial(runs[section], bench))
    recorder.about["seconds"] = round(options.budget - recorder.remaining, 1)
    return recorder.finish()


def chosen_sections(only: Sequence[str] | None) -> list[str]:
    if not only:
        return list(SECTIONS)
    wanted = {section for choice in only for section in WITH.get(choice, (choice,))} | set(ALWAYS)
    return [section for section in SECTIONS if section in wanted]
