"""Many prompts: generate_many against padded generate() calls and transformers' generate_batch, and how many requests
run at once in a given budget of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.bench.decode import share_weights, use_sdpa
from hf_paged.bench.harness import Comparison, compare, synchronizer
from hf_paged.layer_kinds import layer_kinds
from hf_paged.models import cache_keyword
from hf_paged.patches.enable import enable_paged_attention
from hf_paged.patches.linears import pack_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PADDED, BATCH, MANY, PACKED = "padded generate()", "generate_batch", "generate_many", "generate_many, packed linears"
ROWS = 16
"""Rows of a padded batch."""


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens, and how many tokens follow each.

    Attributes:
        name: what to call it.
        prompts, new_tokens: lengths, one of each for a request.
    """

    name: str
    prompts: tuple[int, ...]
    new_tokens: tuple[int, ...]

    def ids(self, vocabulary: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(10, vocabulary, (length,), generator=generator).tolist() for length in self.prompts]


def spread(low: int, high: int, count: int) -> tuple[int, ...]:
    """`count` lengths from `low` to `high`, evenly, in an order without order."""
    lengths = [round(low + (high - low) * i / max(count - 1, 1)) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    return tuple(lengths[i] for i in order)


RAGGED_PROMPTS = Workload("16 prompts of 16 to 384 tokens, 48 new ones each", spread(16, 384, 16), (48,) * 16)
RAGGED_ANSWERS = Workload("64 prompts of 16 to 96 tokens, 8 to 256 new ones", spread(16, 96, 64), spread(8, 256, 64))
QUICK = Workload("8 prompts of 16 to 128 tokens, 4 to 24 new ones", spread(16, 128, 8), spread(4, 24, 8))


@dataclass(frozen=True)
class BatchingResult:
    """A workload done in each way; `comparison` has the seconds of all of it.

    Attributes:
        agrees: the share of requests whose tokens were those of padded generate() in generate_many. Rounding differs
            between batches, so that near ties may fall either way.
        packed_layers: linear layers that were packed, where they can be (on a CPU).
        left_out: why generate_batch does not serve this model; None if it does.
    """

    workload: Workload
    comparison: Comparison
    agrees: float
    packed_layers: int = 0
    left_out: str | None = None

    def tokens_per_second(self, name: str) -> float:
        """New tokens that were asked for, per second."""
        return sum(self.workload.new_tokens) / self.comparison.timings[name].median

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "requests": len(self.workload.prompts),
            "new_tokens": sum(self.workload.new_tokens),
            "agrees": self.agrees,
            "packed_layers": self.packed_layers,
            "generate_batch_left_out": self.left_out,
            "tokens_per_second": {name: self.tokens_per_second(name) for name in self.comparison.timings},
            **self.comparison.as_dict(),
        }


def measure_batching(
    model: PreTrainedModel,
    workload: Workload,
    *,
    block_size: int = 16,
    rounds: int = 3,
    progress: Callable[[str], object] | None = None,
) -> BatchingResult:
    """Do a workload in each way, alternating. No sequence ends before its number of tokens."""
    ids = workload.ids(model.config.get_text_config().vocab_size)
    plain, ours = without_eos(model), without_eos(model)
    use_sdpa(plain)
    enable_paged_attention(ours)
    ways = {
        PADDED: partial(_padded, plain),
        BATCH: partial(generate_batch, plain),
        MANY: partial(_many, ours, block_size),
    }
    report, left_out = None, None
    if model.device.type == "cpu":
        packed = without_eos(model)
        report = pack_linears(packed)
        if report.packed:
            ways[PACKED] = partial(_many, packed, block_size)
    tokens: dict[str, list[list[int]]] = {}

    def run(name: str) -> None:
        tokens[name] = ways[name](ids, workload.new_tokens)

    for name in (MANY, *(name for name in ways if name != MANY)):  # ours first: it says soonest what cannot be batched
        try:
            ways[name](ids[:2], (4, 4))  # a few tokens, so that nothing is made for the first time below
        except Exception as error:  # whatever transformers' own batching raises about a model
            if name != BATCH:
                raise
            lines = str(error).strip().splitlines()
            left_out = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if left_out:
        del ways[BATCH]
    comparison = compare(
        {name: partial(run, name) for name in ways},
        repeats=rounds,
        warmup=0,
        sync=synchronizer(model.device),
        progress=lambda text: progress(f"{workload.name}, {text}") if progress else None,
    )
    same = [a == b for a, b in zip(tokens[PADDED], tokens[MANY], strict=True)]
    return BatchingResult(workload, comparison, sum(same) / len(same), report.packed if report else 0, left_out)


def _padded(model: PreTrainedModel, ids: Sequence[list[int]], new_tokens: Sequence[int]) -> list[list[int]]:
    tokens: list[list[int]] = []
    for first in range(0, len(ids), ROWS):
        rows, wanted = ids[first : first + ROWS], new_tokens[first : first + ROWS]
        output = generate_padded(model, rows, max(wanted))
        tokens += [row[:count] for row, count in zip(output, wanted, strict=True)]
    return tokens


def _many(
    model: PreTrainedModel, block_size: int, ids: Sequence[list[int]], new_tokens: Sequence[int]
) -> list[list[int]]:
    blocks = sum(-(-(len(prompt) + count) // block_size) for prompt, count in zip(ids, new_tokens, strict=True))
    with ContinuousBatcher(model, num_blocks=blocks, block_size=block_size) as batcher:
        handles = [
            batcher.submit(prompt, max_new_tokens=count, do_sample=False)
            for prompt, count in zip(ids, new_tokens, strict=True)
        ]
        batcher.run()
        return [handle.tokens for handle in handles]


@dataclass(frozen=True)
class CapacityResult:
    """How many requests run at once in a budget of KV memory.

    Attributes:
        budget_tokens: what the memory holds.
        max_length: tokens that a reservation must foresee for a request.
        reserved_requests: rows of a cache that reserves as much (StaticCache) which fit.
        paged_requests: requests that ran at once in blocks, at the peak.
        reserved_tokens_per_second, paged_tokens_per_second: new tokens that were asked for.
    """

    budget_tokens: int
    max_length: int
    num_requests: int
    reserved_requests: int
    paged_requests: int
    reserved_tokens_per_second: float
    paged_tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return vars(self).copy()


def measure_capacity(
    model: PreTrainedModel,
    *,
    reserved_requests: int = 8,
    max_length: int = 512,
    num_requests: int = 64,
    block_size: int = 16,
    progress: Callable[[str], object] | None = None,
) -> CapacityResult:
    """Serve requests of 24 to 96 tokens and 16 to 64 new ones in the memory that `reserved_requests` rows of
    `max_length` tokens take: reserved, with StaticCache in batches of so many rows, and in blocks."""
    import time

    from transformers import StaticCache

    say, sync = progress or (lambda text: None), synchronizer(model.device) or (lambda: None)
    workload = Workload("capacity", spread(24, 96, num_requests), spread(16, 64, num_requests)[::-1])
    ids = workload.ids(model.config.get_text_config().vocab_size)
    plain, ours = without_eos(model), without_eos(model)
    use_sdpa(plain)
    enable_paged_attention(ours)
    new_tokens, budget = sum(workload.new_tokens), reserved_requests * max_length

    with ContinuousBatcher(ours, num_blocks=budget // block_size, block_size=block_size):
        pass  # says at once what cannot be batched
    say(f"capacity: {reserved_requests} rows of {max_length} tokens, reserved")
    began = time.perf_counter()
    for first in range(0, num_requests, reserved_requests):
        rows = ids[first : first + reserved_requests]
        cache = StaticCache(config=plain.config, max_cache_len=max_length)
        generate_padded(plain, rows, max(workload.new_tokens[first : first + reserved_requests]), cache)
    sync()
    reserved_seconds = time.perf_counter() - began

    say(f"capacity: the same memory in blocks of {block_size} tokens")
    began = time.perf_counter()
    with ContinuousBatcher(ours, num_blocks=budget // block_size, block_size=block_size) as batcher:
        for prompt, count in zip(ids, workload.new_tokens, strict=True):
            batcher.submit(prompt, max_new_tokens=count, do_sample=False)
        batcher.run()
        sync()
        paged_seconds, stats = time.perf_counter() - began, batcher.stats()
    return CapacityResult(
        budget_tokens=budget,
        max_length=max_length,
        num_requests=num_requests,
        reserved_requests=reserved_requests,
        paged_requests=stats.peak_running,
        reserved_tokens_per_second=new_tokens / reserved_seconds,
        paged_tokens_per_second=new_tokens / paged_seconds,
    )


def can_batch(model: PreTrainedModel) -> bool:
    """Whether the model's layers can be fed packed sequences at all."""
    return not model.config.is_encoder_decoder and all(
        kind in ("full_attention", "sliding_attention") for kind in layer_kinds(model.config)[0]
    )


def without_eos(model: PreTrainedModel) -> PreTrainedModel:
    """A twin on the same weights, whose sequences end when they are long enough and not before."""
    twin = share_weights(model)
    twin.config = copy.deepcopy(twin.config) if twin.config is model.config else twin.config
    twin.generation_config = copy.deepcopy(model.generation_config)
    for config in (twin.generation_config, twin.config, twin.config.get_text_config()):
        config.eos_token_id = None
    return twin


def generate_padded(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], new_tokens: int, cache: Any = None
) -> list[list[int]]:
    """One generate() call for rows padded on the left; their new tokens."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    options = {} if cache is None else {cache_keyword(model): cache}
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output[:, longest:].tolist()


def generate_batch(model: PreTrainedModel, ids: Sequence[list[int]], new_tokens: Sequence[int]) -> list[list[int]]:
    """generate_batch, which has one number of new tokens for all; so each request is added by itself."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=max(new_tokens), eos_token_id=-1)
    done: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        names = [
            manager.add_request(list(prompt), max_new_tokens=count, eos_token_id=-1)
            for prompt, count in zip(ids, new_tokens, strict=True)
        ]
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch has stopped")
    return [done[name] for name in names]
