"""`hf-paged bench`: all measurements in a row. `run_suite` computes, `report.print_suite` shows, `as_dict` is the
JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_paged.bench.attention import attention_shape, measure_attention_layer
from hf_paged.bench.batching import (
    QUICK,
    RAGGED_ANSWERS,
    RAGGED_PROMPTS,
    BatchingResult,
    CapacityResult,
    can_batch,
    measure_batching,
    measure_capacity,
)
from hf_paged.bench.beams import BeamResult, measure_beams
from hf_paged.bench.block_sizes import POINTS as BLOCK_POINTS
from hf_paged.bench.block_sizes import QUICK_POINTS as QUICK_BLOCK_POINTS
from hf_paged.bench.block_sizes import SIZES, BlockSizesResult, measure_block_sizes
from hf_paged.bench.compiled import CompiledResult, measure_compiled
from hf_paged.bench.decode import POINTS, QUICK_POINTS, DecodePoint, DecodeResult, measure_decode
from hf_paged.bench.harness import Machine, describe_machine
from hf_paged.bench.host import HostResult, measure_host
from hf_paged.bench.launch import measure_launches
from hf_paged.bench.memory import LENGTHS, QUICK_LENGTHS, MemoryResult, measure_memory
from hf_paged.bench.prefill import PrefillResult, measure_prefill
from hf_paged.models import display_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PARTS = (
    "attention",
    "prefill",
    "decode",
    "compiled",
    "memory",
    "beams",
    "batching",
    "capacity",
    "blocks",
    "host",
    "launch",
)


@dataclass(frozen=True)
class SuiteOptions:
    """What to measure: `quick` chooses what the other fields leave open.

    Attributes:
        block_size: of all parts but `blocks`, which compares `block_sizes`.
    """

    quick: bool = False
    parts: Collection[str] = PARTS
    points: Sequence[DecodePoint] | None = None
    rounds: int | None = None
    block_size: int = 16
    block_sizes: Sequence[int] = SIZES


@dataclass(frozen=True)
class AttentionResult:
    """One attention layer of the model's shape at one point; `figures` are those of `measure_attention_layer`."""

    point: DecodePoint
    heads: int
    kv_heads: int
    head_dim: int
    figures: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.point.batch,
            "length": self.point.length,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **self.figures,
        }


@dataclass(frozen=True)
class SuiteResult:
    """What was measured; a part that was left out is empty."""

    model: str
    dtype: str
    device: str
    block_size: int
    machine: Machine
    attention: tuple[AttentionResult, ...] = ()
    prefill: tuple[PrefillResult, ...] = ()
    decode: tuple[DecodeResult, ...] = ()
    compiled: tuple[CompiledResult, ...] = ()
    compiled_error: str | None = None
    """Why nothing could be compiled here."""
    memory: MemoryResult | None = None
    beams: BeamResult | None = None
    batching: tuple[BatchingResult, ...] = ()
    capacity: CapacityResult | None = None
    blocks: BlockSizesResult | None = None
    host: HostResult | None = None
    launch: Mapping[str, float | str] | None = None
    """As `measure_launches`, or an error."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Parts that this model cannot have, and why."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Parts that broke off, and what was raised."""
    is_interrupted: bool = False
    """By the user, after whom nothing more was measured."""

    @property
    def title(self) -> str:
        """What was measured where, in a few words."""
        machine = self.machine.cpu if self.device == "cpu" else self.machine.accelerator or self.device
        return f"{self.model}, {self.dtype}, {machine}"

    @property
    def passed(self) -> bool:
        """Whether both sides computed the same wherever they were compared, and no part broke off."""
        compared = (*self.prefill, *self.decode, *self.compiled, self.beams, self.blocks)
        return not self.failures and all(result is None or result.agrees for result in compared)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "block_size": self.block_size,
            "machine": self.machine.as_dict(),
            "passed": self.passed,
            "left_out": dict(self.left_out),
            "failures": dict(self.failures),
            "interrupted": self.is_interrupted,
            "attention_us": [result.as_dict() for result in self.attention],
            "prefill": [result.as_dict() for result in self.prefill],
            "decode": [result.as_dict() for result in self.decode],
            "compiled": [result.as_dict() for result in self.compiled],
            "compiled_error": self.compiled_error,
            "memory": self.memory.as_dict() if self.memory else None,
            "beams": self.beams.as_dict() if self.beams else None,
            "batching": [result.as_dict() for result in self.batching],
            "capacity": self.capacity.as_dict() if self.capacity else None,
            "blocks": self.blocks.as_dict() if self.blocks else None,
            "host": self.host.as_dict() if self.host else None,
            "launch": dict(self.launch) if self.launch else None,
        }


def run_suite(
    model: PreTrainedModel,
    options: SuiteOptions,
    *,
    progress: Callable[[str], object] | None = None,
) -> SuiteResult:
    """Measure the parts that `options` names, one after the other. A part that breaks off is told of, and the others go
    on."""
    points = options.points or (QUICK_POINTS if options.quick else POINTS)
    block_size, rounds = options.block_size, options.rounds or (5 if options.quick else 9)
    say = progress or (lambda text: None)
    common = {"block_size": block_size, "progress": progress}
    is_cpu = model.device.type == "cpu"
    left_out: dict[str, str] = {}
    failures: dict[str, str] = {}

    def measured(part: str, measure: Callable[[], Any]) -> Any:
        """What a part gave; a part that breaks off must not take the others with it, which may have taken an hour."""
        nonlocal is_interrupted
        if part not in options.parts or is_interrupted:
            return None
        try:
            return measure()
        except NotImplementedError as error:
            left_out[part] = _first_line(error)
        except Exception as error:  # whatever a model's code raises
            failures[part] = f"{type(error).__name__}: {_first_line(error)}"
            logger.info("%s broke off", part, exc_info=True)
        except KeyboardInterrupt:  # what took long until now is shown
            failures[part] = "interrupted; what comes after it was not measured"
            is_interrupted = True
        return None

    def each(part: str, measure: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
        """What a part gave one after the other, until it was done or broke off."""
        results: list[Any] = []

        def collect() -> None:
            for result in measure():
                results.append(result)  # one by one: what came before an error is kept

        measured(part, collect)
        return tuple(results)

    def compile_and_measure() -> Iterator[CompiledResult]:
        nonlocal compiled_error
        try:
            yield from measure_compiled(model, points, rounds=rounds, **common)
        except RuntimeError as error:  # no compiler here, or a model that cannot be compiled
            compiled_error = f"decode steps cannot be compiled: {_first_line(error)}"

    def serve() -> Iterator[BatchingResult]:
        few = common | {"rounds": 1 if options.quick else options.rounds or 3}
        workloads = (QUICK,) if options.quick else (RAGGED_PROMPTS, RAGGED_ANSWERS)
        return (measure_batching(model, workload, **few) for workload in workloads)

    def launch() -> Mapping[str, float | str]:
        say("launches of the Triton kernels")
        try:
            return measure_launches()
        except RuntimeError as error:
            return {"error": str(error)}

    compiled_error: str | None = None
    is_interrupted = False
    few_beams = {"prompts": 2, "beams": 3, "length": 256, "new_tokens": 8, "rounds": 2} if options.quick else {}
    few_requests = {"reserved_requests": 2, "max_length": 256, "num_requests": 12} if options.quick else {}
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    few_points = options.points or (QUICK_BLOCK_POINTS if options.quick else BLOCK_POINTS)
    found: dict[str, Any] = {}
    if is_cpu:  # it calls the kernels for CPUs
        found["attention"] = each("attention", lambda: _measure_attention(model, points, block_size, say))
    found["prefill"] = each("prefill", lambda: measure_prefill(model, points, rounds=rounds, **common))
    found["decode"] = each("decode", lambda: measure_decode(model, points, rounds=rounds, **common))
    found["compiled"] = each("compiled", compile_and_measure)
    found["memory"] = measured("memory", lambda: measure_memory(model, lengths, **common))
    found["beams"] = measured("beams", lambda: measure_beams(model, **common, **few_beams))
    if can_batch(model):
        found["batching"] = each("batching", serve)
        found["capacity"] = measured("capacity", lambda: measure_capacity(model, **common, **few_requests))
    else:
        refused = [part for part in ("batching", "capacity") if part in options.parts]
        left_out |= dict.fromkeys(refused, "a model with recurrent layers or an encoder is not batched continuously")
    found["blocks"] = measured(
        "blocks",
        lambda: measure_block_sizes(model, few_points, options.block_sizes, rounds=rounds, progress=progress),
    )
    if is_cpu:
        found["host"] = measured("host", lambda: measure_host(model, progress))
    found["launch"] = measured("launch", launch)
    return SuiteResult(
        model=display_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        block_size=block_size,
        machine=describe_machine(),
        compiled_error=compiled_error,
        left_out=left_out,
        failures=failures,
        is_interrupted=is_interrupted,
        **found,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _measure_attention(
    model: PreTrainedModel, points: Sequence[DecodePoint], block_size: int, progress: Callable[[str], object]
) -> Iterator[AttentionResult]:
    heads, kv_heads, head_dim = attention_shape(model)
    for point in points:
        progress(f"attention layer {point}")
        figures = measure_attention_layer(*point, heads, kv_heads, head_dim, model.dtype, block_size)
        yield AttentionResult(point, heads, kv_heads, head_dim, figures)
