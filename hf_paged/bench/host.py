"""What the books and the Python of a decode step cost the host, on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_paged.bench.attention import attention_shape
from hf_paged.layer_kinds import STATE_KINDS, layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, LENGTH = 64, 1024  # of the steps that are begun
STEPS = 200


@dataclass(frozen=True)
class HostResult:
    """Microseconds, medians over `STEPS` steps.

    Attributes:
        begin_us: of beginning a decode step of `ROWS` ragged rows: the mask compared, blocks found, the plan made.
        begin_extended_us: the same in a generate() call that compiles, where the mask is known to have only grown.
        layer_us: of one layer's update and attention, one row with a short context, eager.
        dynamic_layer_us: DynamicCache's update and sdpa, likewise.
        layer_difference_us: the median of their differences, step by step.
    """

    begin_us: float
    begin_extended_us: float
    layer_us: float
    dynamic_layer_us: float
    layer_difference_us: float

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": ROWS, "length": LENGTH, "steps": STEPS}


@torch.no_grad()
def measure_host(model: PreTrainedModel, progress: Callable[[str], object] | None = None) -> HostResult:
    """Measure with caches of the model's shape; the model itself does not run."""
    say = progress or (lambda text: None)
    say("beginning steps")
    begin, extended = (_time_begin(model, extends) for extends in (False, True))
    say("one layer")
    paged, dynamic = _time_layers(model)
    difference = statistics.median(p - d for p, d in zip(paged, dynamic, strict=True))
    return HostResult(begin, extended, statistics.median(paged), statistics.median(dynamic), difference)


def _time_begin(model: PreTrainedModel, extends: bool) -> float:
    from hf_paged import PagedCache

    cache = PagedCache(model.config, num_blocks=ROWS * (-(-(LENGTH + STEPS) // 16) + 1))
    _, kv_heads, dim = attention_shape(model)
    mask = torch.ones(ROWS, LENGTH + STEPS, dtype=torch.bool)
    for row in range(ROWS):
        mask[row, : row % 16] = False  # their blocks are full at different steps
    cache.enter_pass()
    cache.begin_step(ROWS, LENGTH, mask[:, :LENGTH])
    new = torch.zeros(ROWS, kv_heads, LENGTH, dim, dtype=model.dtype)
    for layer in _layers_with_attention(model):
        cache.update(new, new, layer)
    cache.leave_pass(failed=False)
    times = []
    for step in range(STEPS):
        now = mask[:, : LENGTH + step + 1].clone()
        cache.enter_pass()
        start = time.perf_counter()
        cache.begin_extended(ROWS) if extends else cache.begin_step(ROWS, 1, now)
        times.append(time.perf_counter() - start)
        cache.graph_has_run()
        cache.leave_pass(failed=False)
    return statistics.median(times) * 1e6


def _time_layers(model: PreTrainedModel) -> tuple[list[float], list[float]]:
    """Microseconds of a layer in each step, all layers in turn: paged, and dynamic."""
    from hf_paged import PagedCache
    from hf_paged.attention import paged_attention_forward
    from hf_paged.masks import paged_mask

    heads, kv_heads, dim = attention_shape(model)
    context, scale = 16, dim**-0.5
    paged = PagedCache(model.config, num_blocks=-(-(context + STEPS) // 16) + 1)
    dynamic = DynamicCache(config=model.config)
    layers = _layers_with_attention(model)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True, training=False)
    mask = torch.ones(1, context + STEPS, dtype=torch.bool)

    def run(cache: Any, length: int, new: int) -> float:
        query, key = (
            torch.randn(1, heads, new, dim, dtype=model.dtype),
            torch.randn(1, kv_heads, new, dim).to(model.dtype),
        )
        made = None
        if cache is paged:
            cache.enter_pass()
            made = paged_mask(
                batch_size=1,
                q_length=new,
                kv_length=length + new,
                q_offset=cache.get_query_offset(0),
                kv_offset=0,
                attention_mask=mask[:, : length + new],
            )
        attend = paged_attention_forward if cache is paged else sdpa_attention_forward
        start = time.perf_counter()
        for layer in layers:
            keys, values = cache.update(key, key, layer)
            attend(module, query, keys, values, made, dropout=0.0, scaling=scale)
        elapsed = time.perf_counter() - start
        if cache is paged:
            cache.leave_pass(failed=False)
        return elapsed / len(layers) * 1e6

    times: dict[Any, list[float]] = {paged: [], dynamic: []}
    for cache in times:
        run(cache, 0, context)
    for step in range(STEPS):
        for cache in (paged, dynamic)[:: 1 if step % 2 else -1]:
            times[cache].append(run(cache, context + step, 1))
    return times[paged], times[dynamic]


def _layers_with_attention(model: PreTrainedModel) -> list[int]:
    return [index for index, kind in enumerate(layer_kinds(model.config)[0]) if kind not in STATE_KINDS]
