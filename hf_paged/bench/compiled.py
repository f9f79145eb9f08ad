"""One decode step as generate() runs it, compiled and not: PagedCache, StaticCache and DynamicCache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.bench.decode import (
    DecodePoint,
    PointResult,
    fill_all,
    prefill,
    random_ids,
    relative_difference,
    share_weights,
    tolerance_of,
)
from hf_paged.bench.harness import Comparison, compare, synchronizer
from hf_paged.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

DYNAMIC, STATIC, PAGED_EAGER, PAGED = "dynamic", "static compiled", "paged", "paged compiled"
WARMUP = 3  # calls of each side that are not timed; the first of them compiles


@dataclass(frozen=True)
class CompiledResult(PointResult):
    """What one point gave.

    Attributes:
        comparison: seconds of one decode step, by side.
        linear_seconds: of them, what all linear layers of the model take by themselves.
        graphs: new graphs that the compiled paged side made at this point.
        logit_difference: the largest of any side from DynamicCache's logits, relative to the largest logit.
        tolerance: what that may be, for the dtype.
    """

    point: DecodePoint
    comparison: Comparison
    linear_seconds: float
    graphs: int
    logit_difference: float
    tolerance: float

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.comparison.as_dict(),
            "times_as_fast_as_static_compiled": self.comparison.ratio(PAGED, STATIC).as_dict(),
            "linear_s": self.linear_seconds,
            "new_graphs": self.graphs,
        }


def measure_compiled(
    model: PreTrainedModel,
    points: Sequence[DecodePoint],
    *,
    block_size: int = 16,
    rounds: int = 9,
    steps: int = 4,
    progress: Callable[[str], object] | None = None,
) -> Iterator[CompiledResult]:
    """Time decode steps at each of `points`: what generate() does for a token but for choosing it.

    All caches hold the same keys and values, and run the same steps in alternation. StaticCache is as long as its rows
    become, which it must be told beforehand; PagedCache is told nothing.

    Args:
        rounds: how often each side is timed.
        steps: decode steps in one timing.

    Raises:
        RuntimeError: torch.compile does not work here, or not for this model.
    """
    from transformers import CompileConfig

    from hf_paged import enable_paged_attention
    from hf_paged.patches.compiled import EAGER_BECAUSE

    say = progress or (lambda text: None)
    say(f"prefill of {max(point.length for point in points):,} tokens")
    prefix = prefill(model, max(point.length for point in points))
    paged, eager, static = (share_weights(model) for _ in range(3))
    enable_paged_attention(paged, compile=True)
    enable_paged_attention(eager)
    config = CompileConfig(mode="default" if model.device.type == "cpu" else "reduce-overhead")
    models = {DYNAMIC: model, STATIC: static, PAGED_EAGER: eager, PAGED: paged}
    forwards = {
        DYNAMIC: model,
        STATIC: static.get_compiled_call(config),
        PAGED_EAGER: eager,
        PAGED: paged.get_compiled_call(config),
    }
    for point in points:
        room = steps * (rounds + WARMUP)
        blocks = point.batch * -(-(point.length + room) // block_size)
        caches = _make_caches(model, point, room, block_size, blocks)
        fill_all(models, caches, prefix, point)
        ids = random_ids(model, (point.batch, point.length + room))
        steppers = {name: _Stepper(models[name], forwards[name], caches[name], ids, point.length) for name in caches}
        comparison = compare(
            {name: lambda stepper=stepper: stepper.run(steps) for name, stepper in steppers.items()},
            repeats=rounds,
            warmup=WARMUP,
            units=steps,
            sync=synchronizer(model.device),
            progress=lambda text, point=point: say(f"compiled {point}: {text}"),
        )
        if EAGER_BECAUSE in vars(paged):
            raise RuntimeError("; ".join(vars(paged)[EAGER_BECAUSE]))
        want = steppers[DYNAMIC].logits
        yield CompiledResult(
            point=point,
            comparison=comparison,
            linear_seconds=_time_linears(model, point.batch),
            graphs=steppers[PAGED].graphs,
            logit_difference=max(relative_difference(stepper.logits, want) for stepper in steppers.values()),
            tolerance=tolerance_of(model),
        )


def _make_caches(
    model: PreTrainedModel, point: DecodePoint, room: int, block_size: int, blocks: int
) -> dict[str, Cache]:
    from transformers import DynamicCache, StaticCache

    from hf_paged import PagedCache

    return {
        DYNAMIC: DynamicCache(config=model.config),
        STATIC: StaticCache(config=model.config, max_cache_len=point.length + room),
        PAGED_EAGER: PagedCache(model.config, block_size=block_size, num_blocks=blocks),
        PAGED: PagedCache(model.config, block_size=block_size, num_blocks=blocks),
    }


class _Stepper:
    """Runs decode steps by the methods that generate() runs them by."""

    def __init__(
        self, model: PreTrainedModel, forward: Callable[..., Any], cache: Cache, ids: torch.Tensor, length: int
    ) -> None:
        self.model, self.forward, self.ids, self.done = model, forward, ids, length
        mask = torch.ones(len(ids), length + 1, dtype=torch.long, device=ids.device)
        self.kwargs = {
            "attention_mask": mask,
            "position_ids": mask.cumsum(-1) - 1,
            "use_cache": True,
            "logits_to_keep": 1,
            cache_keyword(model): cache,
        }
        self.graphs = 0  # new ones
        self.logits = torch.empty(0)  # [rows, 1, vocabulary] after the first step

    @torch.no_grad()
    def run(self, steps: int) -> None:
        graphs = _count_graphs()
        for _ in range(steps):
            self.done += 1
            inputs = self.model.prepare_inputs_for_generation(
                self.ids[:, : self.done], next_sequence_length=1, **self.kwargs
            )
            outputs = self.forward(**inputs, return_dict=True)
            self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
            self.logits = outputs.logits.to(torch.float32, copy=True)  # a CUDA graph's own are written again
        self.graphs += _count_graphs() - graphs


@torch.no_grad()
def _time_linears(model: PreTrainedModel, batch: int, repeats: int = 7) -> float:
    """Seconds that the model's linear layers take for one token in each of `batch` rows."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [
        torch.randn(batch, 1, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
        for linear in linears
    ]
    sync = synchronizer(model.device) or (lambda: None)
    seconds = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        for linear, rows in zip(linears, inputs, strict=True):
            linear(rows)
        sync()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeats // 2]


def _count_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
