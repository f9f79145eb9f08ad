"""Prompts, what generate() makes of each alone, and the books of a batcher: what batches are compared with."""

from __future__ import annotations

import pytest
import torch

from hf_paged import IMPLEMENTATION, ContinuousBatcher
from tests.helpers import VOCAB, generate, same_tokens


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt: list[int], **options) -> list[int]:
    """What generate() with transformers' own cache gives, without the prompt."""
    return generate(model, torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def assert_alone(model, handle, **options) -> None:
    actual = torch.tensor(handle.prompt_ids + handle.result().tokens)
    same_tokens(model, actual, torch.tensor(handle.prompt_ids + alone(model, handle.prompt_ids, **options)))


def assert_all_free(batcher: ContinuousBatcher) -> None:
    for group, allocator in enumerate(batcher.pool.allocators):
        allocator.check([] if batcher.pool.prefixes is None else batcher.pool.prefixes.tables[group])
        assert allocator.num_free == allocator.num_blocks


def refused(model, message: str) -> BaseException | None:
    with pytest.raises(NotImplementedError, match=message) as caught:
        ContinuousBatcher(model, num_blocks=16)
    assert type(model).__name__ in str(caught.value) and model.config._attn_implementation != IMPLEMENTATION
    return caught.value.__cause__
