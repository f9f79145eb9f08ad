"""Multi-head latent attention (DeepSeek): the blocks hold the compressed latent, as the model's own cache does."""

from __future__ import annotations

import pytest
import torch
from helpers import CACHE_ARGUMENT, WAYS, check_books, generate, generate_dynamic, random_prompts, run_way, same_tokens
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from hf_paged import PagedCache

RANK, ROPE = 16, 8


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=RANK,
        q_lora_rank=16,
        qk_rope_head_dim=ROPE,
        v_head_dim=16,
        qk_nope_head_dim=16,
        first_k_dense_replace=1,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_ordinary_caches_and_so_is_what_is_stored(model: DeepseekV3ForCausalLM, way: str) -> None:
    ids, mask = random_prompts((3, 17, 9))
    paged, dynamic = PagedCache(model.config, block_size=4), DynamicCache(config=model.config)
    with run_way(model, way):
        got = generate(model, ids, mask, paged, max_new_tokens=20)
    check_books(paged)
    same_tokens(model, got, generate_dynamic(model, ids, mask, max_new_tokens=20), mask)
    model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **{CACHE_ARGUMENT: dynamic})
    for ours, theirs in zip(paged.layers, dynamic.layers, strict=True):
        blocks = ours.storage.key_blocks, ours.storage.value_blocks
        assert [(b.shape[1], b.shape[3]) for b in blocks] == [
            (t.shape[1], t.shape[3]) for t in (theirs.keys, theirs.values)
        ]


def test_a_token_takes_the_latent_and_the_rotary_part(model: DeepseekV3ForCausalLM) -> None:
    ids, _ = random_prompts((32,))
    cache = PagedCache(model.config)
    generate(model, ids, None, cache, max_new_tokens=1)
    per_token = cache.stats().token_bytes / cache.stats().tokens
    assert per_token == 2 * (RANK + ROPE) * 4, (
        "two layers, float32; the heads' own keys and values would be 160 numbers"
    )
