"""Many generate() calls in random modes, with failures among them, on one pool: no block is lost, no memory grows."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading

import psutil
import pytest
import torch
from helpers import CACHE_ARGUMENT, check_books, random_prompts, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_paged import BlockPool, OutOfBlocksError, PagedCache, paged_attention


class Injected(Exception):
    pass


class ProcessorFails(LogitsProcessor):
    """Raises when it is called for the n-th time."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self.calls, self.error = calls, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return scores


class CriterionFails(StoppingCriteria):
    """Raises when it is called for the n-th time."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self.calls, self.error = calls, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


MODES: list[dict] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 3},
    {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    {"prefill_chunk_size": 5},
    {"prompt_lookup_num_tokens": 3},
    {"eos_token_id": list(range(0, 199, 7))},
]


def run_many(calls: int, seed: int = 0) -> dict[str, int]:
    """Run so many generate() calls; returns how they ended."""
    chance = random.Random(seed)
    model = tiny_model("llama")
    assistant = tiny_model("qwen3")
    common = random_prompts([40], seed=99)[0][0]
    pools = [BlockPool(num_blocks=40, block_size=4), BlockPool(num_blocks=40, block_size=4, prefix_cache=True)]
    caches: list[PagedCache | None] = [None, None]
    ended: dict[str, int] = {}
    for number in range(calls):
        which = chance.randrange(2)
        options = dict(chance.choice(MODES))
        rows = 1 if "prompt_lookup_num_tokens" in options else chance.choice([1, 1, 2, 3])
        ids, mask = random_prompts([chance.randint(1, 30) for _ in range(rows)], seed=number)
        if chance.random() < 0.5:
            ids = torch.cat([common.repeat(rows, 1)[:, : chance.choice([8, 17])], ids], 1)
            mask = torch.ones_like(ids)
        options |= {"max_new_tokens": chance.randint(1, 20)}
        if chance.random() < 0.3:
            error = chance.choice([Injected, KeyboardInterrupt])
            if chance.random() < 0.5:
                options["logits_processor"] = LogitsProcessorList([ProcessorFails(chance.randint(0, 6), error)])
            else:
                criterion = CriterionFails(chance.randint(0, 6), error)
                options["stopping_criteria"] = StoppingCriteriaList([criterion])
        drafts = rows == 1 and not options.keys() & {"prompt_lookup_num_tokens", "num_beams", "num_return_sequences"}
        if drafts and chance.random() < 0.2:
            options["assistant_model"] = assistant
        kept = pools[which].prefixes is not None
        cache = caches[which] if kept and caches[which] is not None else PagedCache(model.config, pool=pools[which])
        caches[which] = cache if kept else None
        torch.manual_seed(number)
        enabled = kept or chance.random() < 0.7
        how = "ended"
        arguments = {"input_ids": ids, "attention_mask": mask, CACHE_ARGUMENT: cache, "do_sample": False, **options}
        try:
            with paged_attention(model) if enabled else contextlib.nullcontext():
                model.generate(**arguments)
        except (Injected, KeyboardInterrupt, OutOfBlocksError) as error:
            how = type(error).__name__
        ended[how] = ended.get(how, 0) + 1
        check_books(cache)
        del cache, arguments
    caches.clear()
    gc.collect()
    for pool in pools:
        with pool.lock:
            pass  # whoever leaves it releases what was given back meanwhile
        assert [allocator.num_used for allocator in pool.allocators] == [0] * len(pool.allocators)
        pool.forget_prompts()
        assert [allocator.num_idle for allocator in pool.allocators] == [0] * len(pool.allocators)
        for allocator in pool.allocators:
            allocator.check([])
    return ended


def test_some_calls_with_failures_among_them() -> None:
    ended = run_many(60)
    assert set(ended) == {"ended", "Injected", "KeyboardInterrupt", "OutOfBlocksError"}, ended


@pytest.mark.slow
def test_a_thousand_calls_with_failures_among_them() -> None:
    """`HF_PAGED_CALLS` is their number."""
    calls = int(os.environ.get("HF_PAGED_CALLS", "1000"))
    run_many(50)
    gc.collect()
    before = psutil.Process().memory_info().rss
    ended = run_many(calls, seed=1)
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    print(ended, f"resident memory grew by {grown / 1e6:.1f} MB over {calls} calls")
    assert grown < 60e6


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_two_threads_on_one_pool_give_the_answers_of_one(prefix_cache: bool) -> None:
    model = tiny_model("llama")
    common = random_prompts([40], seed=99)[0][0]
    prompts = [torch.cat([common, random_prompts([3 + n], seed=n)[0][0]])[None] for n in range(8)]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options) for ids in prompts]
    pool = BlockPool(num_blocks=60, block_size=4, prefix_cache=prefix_cache)
    answers: dict[tuple[int, int], torch.Tensor] = {}

    def work(thread: int) -> None:
        for round_ in range(3):
            for number in range(thread, 8, 2):
                cache = PagedCache(model.config, pool=pool)
                mask = torch.ones_like(prompts[number])
                arguments = {"input_ids": prompts[number], "attention_mask": mask, CACHE_ARGUMENT: cache}
                answers[round_, number] = model.generate(**arguments, **options)

    with paged_attention(model):
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 24
    assert all(torch.equal(tokens, expected[number]) for (_, number), tokens in answers.items())
    with pool.lock:
        pass
    assert pool.allocators[0].num_used == 0
    pool.forget_prompts()
    pool.allocators[0].check([])
