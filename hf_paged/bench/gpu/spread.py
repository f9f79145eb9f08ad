"""A model whose layers are on two devices: each layer's blocks are on its own, and the tokens those of one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.recorder import Skip
from hf_paged.bench.gpu.results import Result

LAYERS = 4
PROMPTS = (5, 40, 17, 90)
NEW_TOKENS = 24


def compare_over_two_devices(bench: Bench) -> Result:
    """Raises Skip where there are no two devices."""
    if not bench.on_gpu or torch.cuda.device_count() < 2:
        raise Skip(f"it takes two GPUs, and there are {torch.cuda.device_count() if bench.on_gpu else 0}")
    return compare_over(bench, [torch.device("cuda", 0), torch.device("cuda", 1)])


def compare_over(bench: Bench, devices: Sequence[torch.device]) -> Result:
    """Tokens of `generate_many` and of generate() with a PagedCache over devices, against those on the first alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {**bench.sizes.model, "num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    config = LlamaConfig(**options, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    model: Any = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, config.vocab_size, (n,), generator=generator).tolist() for n in PROMPTS]
    spread = spread_over(copy.deepcopy(model), devices)
    expected, _ = _tokens(model.to(devices[0]), prompts)
    actual, places = _tokens(spread, prompts)
    pairs = [(a, b) for one, two in zip(expected, actual, strict=True) for a, b in zip(one, two, strict=True)]
    values = {
        "equal_tokens": sum(a == b for a, b in pairs) / len(pairs),
        "blocks_on": ", ".join(sorted({str(place) for place in places})),
    }
    right = places == [parameter_device(layer) for layer in spread.model.layers]
    return Result("", "", values, passed=values["equal_tokens"] == 1 and right)


def spread_over(model: Any, devices: Sequence[torch.device]) -> Any:
    """The model with equal shares of its layers on each device, by accelerate's hooks."""
    from accelerate import dispatch_model

    layers, first, last = len(model.model.layers), devices[0], devices[-1]
    places: dict[str, Any] = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last}
    places |= {f"model.layers.{i}": devices[i * len(devices) // layers] for i in range(layers)} | {"lm_head": last}
    return dispatch_model(model, places, main_device=first, force_hooks=True, skip_keys=["past_key_values", "cache"])


def parameter_device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device


def _tokens(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.device]]:
    """New tokens of all prompts in both ways, and where the blocks of each layer are."""
    from hf_paged import BlockPool, PagedCache, generate_many, paged_attention
    from hf_paged.models import cache_keyword, input_device

    pool = BlockPool(num_blocks=64)
    results = generate_many(model, prompts, max_new_tokens=NEW_TOKENS, do_sample=False, pool=pool)
    tokens = [result.tokens for result in results]
    with paged_attention(model, compile=False):
        for prompt in prompts:
            ids = torch.tensor([prompt], device=input_device(model))
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                **{cache_keyword(model): PagedCache(model.config, pool=BlockPool(num_blocks=16))},
            )
            tokens.append(output[0, len(prompt) :].tolist())
    return tokens, [pool.storages[layer].device for layer in sorted(pool.storages)]
