"""Whole beam searches: prompts that are computed once, and beams that share their blocks, against DynamicCache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.bench.decode import DYNAMIC, PAGED, share_weights, use_sdpa
from hf_paged.bench.harness import Comparison, compare, synchronizer
from hf_paged.bench.memory import dynamic_bytes
from hf_paged.cache import PagedCache
from hf_paged.models import cache_keyword
from hf_paged.patches.enable import enable_paged_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS, BEAMS, LENGTH, NEW_TOKENS = 4, 4, 1024, 32


@dataclass(frozen=True)
class BeamResult:
    """One beam search with both caches.

    Attributes:
        comparison: seconds of whole generate() calls.
        dynamic_bytes, paged_bytes: keys and values at the peak: of DynamicCache its tensors at the end, without the
            copies that it makes meanwhile; of PagedCache its blocks in use.
        agrees: both gave the same tokens.
    """

    prompts: int
    beams: int
    length: int
    new_tokens: int
    comparison: Comparison
    dynamic_bytes: int
    paged_bytes: int
    agrees: bool

    @property
    def memory_share(self) -> float:
        return self.paged_bytes / self.dynamic_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "beams": self.beams,
            "length": self.length,
            "new_tokens": self.new_tokens,
            "agrees": self.agrees,
            "dynamic_bytes": self.dynamic_bytes,
            "paged_bytes": self.paged_bytes,
            **self.comparison.as_dict(),
        }


def measure_beams(
    model: PreTrainedModel,
    *,
    prompts: int = PROMPTS,
    beams: int = BEAMS,
    length: int = LENGTH,
    new_tokens: int = NEW_TOKENS,
    block_size: int = 16,
    rounds: int = 3,
    progress: Callable[[str], object] | None = None,
) -> BeamResult:
    """Search `beams` beams for each of `prompts` random prompts of `length` tokens, `new_tokens` further."""
    from transformers import DynamicCache

    paged_model = share_weights(model)
    enable_paged_attention(paged_model)
    model = share_weights(model)
    use_sdpa(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.get_text_config().vocab_size, (prompts, length), generator=generator)
    ids = ids.to(model.device)
    options: Mapping[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "num_beams": beams,
        "do_sample": False,
        "min_new_tokens": new_tokens,
        "max_new_tokens": new_tokens,
        "pad_token_id": 0,
    }
    tokens: dict[str, torch.Tensor] = {}
    nbytes: dict[str, int] = {}

    def dynamic() -> None:
        cache = DynamicCache(config=model.config)
        tokens[DYNAMIC] = model.generate(**options, **{cache_keyword(model): cache})
        nbytes[DYNAMIC] = dynamic_bytes(cache)

    def paged() -> None:
        blocks = prompts * -(-length // block_size) + 2 * prompts * beams * (2 - -(new_tokens) // block_size)
        cache = PagedCache(paged_model.config, block_size=block_size, num_blocks=blocks)
        tokens[PAGED] = paged_model.generate(**options, **{cache_keyword(paged_model): cache})
        nbytes[PAGED] = cache.stats().peak_bytes

    comparison = compare(
        {DYNAMIC: dynamic, PAGED: paged},
        repeats=rounds,
        sync=synchronizer(model.device),
        progress=lambda text: progress(f"beam search, {text}") if progress else None,
    )
    return BeamResult(
        prompts, beams, length, new_tokens, comparison, nbytes[DYNAMIC], nbytes[PAGED],
        torch.equal(tokens[DYNAMIC], tokens[PAGED]),
    )  # fmt: skip
