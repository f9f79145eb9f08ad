"""`hf-paged bench`: all measurements in a row. `run_suite` computes, `report.print_suite` shows, `as_dict` is the
JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    @property
    def title(self) -> str:
        """What was measured where, in a few words."""
        machine = self.machine.cpu if self.device == "cpu" else self.machine.accelerator or self.device
        return f"{self.model}, {self.dtype}, {machine}"

    @property
    def passed(self) -> bool:
        """Whether both sides computed the same wherever they were compared."""
        compared = (*self.prefill, *self.decode, *self.compiled, self.beams, self.blocks)
        return all(result is None or result.agrees for result in compared)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "block_size": self.block_size,
            "machine": self.machine.as_dict(),
            "passed": self.passed,
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
    """Measure the parts that `options` names, one after the other."""
    points = options.points or (QUICK_POINTS if options.quick else POINTS)
    attention: tuple[AttentionResult, ...] = ()
    decode: tuple[DecodeResult, ...] = ()
    block_size, rounds = options.block_size, options.rounds or (5 if options.quick else 9)
    memory = None
    if "attention" in options.parts and model.device.type == "cpu":  # it calls the kernels for CPUs
        attention = tuple(_measure_attention(model, points, block_size, progress or (lambda text: None)))
    prefill: tuple[PrefillResult, ...] = ()
    if "prefill" in options.parts:
        prefill = tuple(measure_prefill(model, points, block_size=block_size, rounds=rounds, progress=progress))
    if "decode" in options.parts:
        decode = tuple(measure_decode(model, points, block_size=block_size, rounds=rounds, progress=progress))
    compiled: tuple[CompiledResult, ...] = ()
    compiled_error = None
    if "compiled" in options.parts:
        try:
            compiled = tuple(measure_compiled(model, points, block_size=block_size, rounds=rounds, progress=progress))
        except RuntimeError as error:  # no compiler here, or a model that cannot be compiled
            compiled_error = f"decode steps cannot be compiled: {str(error).strip().splitlines()[0]}"
    if "memory" in options.parts:
        lengths = QUICK_LENGTHS if options.quick else LENGTHS
        memory = measure_memory(model, lengths, block_size=block_size, progress=progress)
    beams = None
    if "beams" in options.parts:
        sizes = {"prompts": 2, "beams": 3, "length": 256, "new_tokens": 8, "rounds": 2} if options.quick else {}
        beams = measure_beams(model, block_size=block_size, progress=progress, **sizes)
    batching: tuple[BatchingResult, ...] = ()
    if "batching" in options.parts and can_batch(model):
        few = {"rounds": 1 if options.quick else options.rounds or 3, "block_size": block_size, "progress": progress}
        workloads = (QUICK,) if options.quick else (RAGGED_PROMPTS, RAGGED_ANSWERS)
        batching = tuple(measure_batching(model, workload, **few) for workload in workloads)
    capacity = None
    if "capacity" in options.parts and can_batch(model):
        sizes = {"reserved_requests": 2, "max_length": 256, "num_requests": 12} if options.quick else {}
        capacity = measure_capacity(model, block_size=block_size, progress=progress, **sizes)
    blocks = None
    if "blocks" in options.parts:
        few_points = options.points or (QUICK_BLOCK_POINTS if options.quick else BLOCK_POINTS)
        blocks = measure_block_sizes(model, few_points, options.block_sizes, rounds=rounds, progress=progress)
    host = None
    if "host" in options.parts and model.device.type == "cpu":
        host = measure_host(model, progress)
    launch: Mapping[str, float | str] | None = None
    if "launch" in options.parts:
        (progress or (lambda text: None))("launches of the Triton kernels")
        try:
            launch = measure_launches()
        except RuntimeError as error:
            launch = {"error": str(error)}
    return SuiteResult(
        model=display_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        block_size=block_size,
        machine=describe_machine(),
        attention=attention,
        prefill=prefill,
        decode=decode,
        compiled=compiled,
        compiled_error=compiled_error,
        memory=memory,
        beams=beams,
        batching=batching,
        capacity=capacity,
        blocks=blocks,
        host=host,
        launch=launch,
    )


def _measure_attention(
    model: PreTrainedModel, points: Sequence[DecodePoint], block_size: int, progress: Callable[[str], object]
) -> Iterator[AttentionResult]:
    heads, kv_heads, head_dim = attention_shape(model)
    for point in points:
        progress(f"attention layer {point}")
        figures = measure_attention_layer(*point, heads, kv_heads, head_dim, model.dtype, block_size)
        yield AttentionResult(point, heads, kv_heads, head_dim, figures)
