"""Small random models, ways to run them, and comparisons, shared by the tests."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CompileConfig,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)
from transformers.modeling_layers import MtpModel

from hf_paged import PagedCache, paged_attention, use_backend

PAD = 0
VOCAB = 199
TIE = 1e-4
"""Two logits closer than this may change places between two exact ways of computing them."""

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What models call their cache argument: transformers renamed it after 5.17."""

WAYS = ("plain", "cpu", "reference")
"""A PagedCache on a model that is not enabled, and on an enabled one with each of the backends that run on a CPU."""
ENABLED_WAYS = WAYS[1:]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 1024,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

_OWN_CODE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}

_BUILDERS: dict[str, Callable[..., tuple[type[PreTrainedModel], Any]]] = {
    "llama": lambda **sizes: (LlamaForCausalLM, LlamaConfig(**(_SIZES | sizes))),
    "qwen3": lambda **sizes: (Qwen3ForCausalLM, Qwen3Config(**(_SIZES | sizes))),
    "gpt2": lambda **sizes: (GPT2LMHeadModel, GPT2Config(**(_GPT2_SIZES | sizes))),
    "mistral": lambda **sizes: (MistralForCausalLM, MistralConfig(**(_SIZES | {"sliding_window": 8} | sizes))),
    # Windowed and full layers in turn, soft-capped scores, and a scale of its own.
    "gemma2": lambda **sizes: (
        Gemma2ForCausalLM,
        Gemma2Config(
            **(
                _SIZES
                | {
                    "sliding_window": 8,
                    "query_pre_attn_scalar": 16,
                    "attn_logit_softcapping": 5.0,
                    "final_logit_softcapping": None,
                }
                | sizes
            )
        ),
    ),
    # Windowed and full layers in turn, and attention sinks.
    "gpt_oss": lambda **sizes: (
        GptOssForCausalLM,
        GptOssConfig(
            **(
                _SIZES
                | {
                    "sliding_window": 8,
                    "num_local_experts": 4,
                    "num_experts_per_tok": 2,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                }
                | sizes
            )
        ),
    ),
    # Attention and a recurrent state side by side in every layer.
    "falcon_h1": lambda **sizes: (
        FalconH1ForCausalLM,
        FalconH1Config(
            **(
                _SIZES
                | {
                    "mamba_d_ssm": 64,
                    "mamba_n_heads": 4,
                    "mamba_d_head": 16,
                    "mamba_d_state": 8,
                    "mamba_n_groups": 1,
                    "mamba_chunk_size": 4,
                }
                | sizes
            )
        ),
    ),
    # Linear attention in three layers of four.
    "qwen3_next": lambda **sizes: (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **(
                _SIZES
                | {
                    "num_hidden_layers": 4,
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4,
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32,
                    "shared_expert_intermediate_size": 32,
                }
                | sizes
            )
        ),
    ),
    # Attention in the models' own code, not through the attention interface.
    "bloom": lambda **sizes: (
        BloomForCausalLM,
        BloomConfig(**(_OWN_CODE | {"hidden_size": 64, "n_layer": 2, "n_head": 4} | sizes)),
    ),
    "falcon": lambda **sizes: (
        FalconForCausalLM,
        FalconConfig(**(_OWN_CODE | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | sizes)),
    ),
    "mpt": lambda **sizes: (
        MptForCausalLM,
        MptConfig(
            **(_OWN_CODE | {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "use_cache": True} | sizes)
        ),
    ),
    "gpt_neo": lambda **sizes: (
        GPTNeoForCausalLM,
        GPTNeoConfig(
            **(
                _OWN_CODE
                | {
                    "hidden_size": 64,
                    "num_layers": 2,
                    "num_heads": 4,
                    "attention_types": [[["global", "local"], 1]],
                    "window_size": 8,
                    "max_position_embeddings": 512,
                }
                | sizes
            )
        ),
    ),
    "xglm": lambda **sizes: (
        XGLMForCausalLM,
        XGLMConfig(
            **(
                {
                    "vocab_size": VOCAB,
                    "d_model": 64,
                    "ffn_dim": 96,
                    "num_layers": 2,
                    "attention_heads": 4,
                    "init_std": 0.2,
                    "pad_token_id": PAD,
                    "bos_token_id": None,
                    "eos_token_id": None,
                }
                | sizes
            )
        ),
    ),
}
_KNOW_EAGER_ONLY = ("bloom", "mpt", "gpt_neo", "xglm")
_NEEDS_EAGER = ("gemma2", "gpt_oss")  # softcap and sinks, which sdpa refuses or ignores


@functools.cache
def tiny_model(family: str, attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A random model in float32, the same one at every call: leave it as it is found.

    The weights are wide, so that scores are far from uniform and the best token hangs on every one that came before.
    """
    return build_model(family, attn_implementation, seed)


def build_model(family: str, attn_implementation: str | None = None, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A random model of one's own, with other sizes if asked for."""
    model_class, config = _BUILDERS[family](**sizes)
    if attn_implementation is None:
        attn_implementation = "eager" if family in _NEEDS_EAGER else "sdpa"
    if family not in _KNOW_EAGER_ONLY:
        config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=1.0)
    model.generation_config.pad_token_id = PAD
    return model


@contextlib.contextmanager
def run_way(model: torch.nn.Module, way: str) -> Iterator[None]:
    """Run a PagedCache one of `WAYS` within, or `compiled`."""
    if way == "plain":
        yield
    elif way == "compiled":
        with paged_attention(model, compile=True), compiled_quickly(model):
            yield
    else:
        with use_backend(way), paged_attention(model):
            yield


@contextlib.contextmanager
def compiled_quickly(model: Any) -> Iterator[None]:
    """What generate() compiles within, it compiles in one graph or not at all, and without a code generator: graphs and
    guards are the same."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = model.generation_config.compile_config
    model.generation_config.compile_config = CompileConfig(backend="eager", mode="default", fullgraph=True)
    try:
        yield
    finally:
        model.generation_config.compile_config = before


@contextlib.contextmanager
def fed(model: torch.nn.Module) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the ids that the model's forward passes get within."""
    shapes: list[tuple[int, int]] = []
    forward = model.forward

    @functools.wraps(forward)  # no hook, which may change what a model computes
    def watched(*args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    model.forward = watched
    try:
        yield shapes
    finally:
        del model.forward


def random_prompts(lengths: Sequence[int], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths in one left-padded batch, and its mask: both `[rows, longest]`."""
    generator = torch.Generator().manual_seed(seed)
    return pad_left([torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths])


def pad_left(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of these rows of ids, and its mask."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


def generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None, **options: Any
) -> Any:
    """`model.generate` with the cache under the name that this version gives it; greedy unless told otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": PAD} | options
    return model.generate(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options)


def forward(model: torch.nn.Module, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    """One forward pass with the cache under the name that this version gives it."""
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}, **options)


def generate_dynamic(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
    """`generate` with transformers' own cache."""
    return generate(model, *args, cache=DynamicCache(config=model.config), **options)


@torch.no_grad()
def logits_alone(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """`[len(tokens), vocab]`: the logits of one row by itself, without padding and without a cache."""
    return model(input_ids=tokens[None], use_cache=False).logits[0]


_next_alone: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def greedy_alone(model: PreTrainedModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """`tokens` and `count` greedy ones after it, each from a forward pass over the whole row without a cache.

    What was worked out once is kept, since the same rows are asked for with every way of running a cache: do not
    change a model's weights after the first call.
    """
    known = _next_alone.setdefault(model, {})
    row = tuple(tokens.tolist())
    for _ in range(count):
        if row not in known:
            known[row] = int(logits_alone(model, torch.tensor(row))[-1].argmax())
        row += (known[row],)
    return torch.tensor(row)


_in_float64: dict[int, tuple[PreTrainedModel, PreTrainedModel]] = {}


def same_tokens(
    model: PreTrainedModel, actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Assert that two greedy outputs agree, row by row.

    A row may differ from where a float64 run of the model, without a cache, finds the two best logits closer than
    `TIE`: there any exact computation may choose either.

    Args:
        actual, expected: `[rows, length]` or `[length]`, prompts included.
        mask: `[rows, prompt length]`, 0 at the prompts' padding.
    """
    actual, expected = torch.atleast_2d(actual), torch.atleast_2d(expected)
    assert actual.shape == expected.shape, f"{list(actual.shape)} is not {list(expected.shape)}"
    for row in range(len(actual)):
        different = (actual[row] != expected[row]).nonzero().flatten()
        if not len(different):
            continue
        first = int(different[0])
        if id(model) not in _in_float64:
            exact = copy.deepcopy(model).double()
            _in_float64[id(model)] = model, exact
        before = expected[row, :first]
        if mask is not None:
            before = before[torch.nn.functional.pad(mask[row], (0, first - mask.shape[1]), value=1).bool()]
        best = logits_alone(_in_float64[id(model)][1], before)[-1].topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap < TIE, (
            f"row {row} differs from position {first} on: {actual[row, first:].tolist()} is not "
            f"{expected[row, first:].tolist()} (the two best logits are {gap:.3g} apart)"
        )
        assert {int(actual[row, first]), int(expected[row, first])} == set(best.indices.tolist())


def snapshot(cache: PagedCache) -> dict[str, Any]:
    """All that a failed call must leave as it was: blocks, tables, lengths, and what the tables lead to."""
    stats = cache.stats().as_dict()
    for name in ("peak_blocks", "peak_bytes", "reserved_bytes", "total_blocks", "free_blocks"):
        stats.pop(name)  # the pool may have been made meanwhile
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return {
        "stats": stats,
        "tables": copy.deepcopy(cache.block_tables),
        "lengths": list(cache.row_lengths),
        "padded": cache.get_seq_length(),
        "keys": [None if key is None else key.clone() for key in keys],
    }


def assert_unchanged(cache: PagedCache, before: dict[str, Any], *others: PagedCache) -> None:
    """Assert that `cache` is as `snapshot` found it, and that the books are right; `others` are on the same pool."""
    after = snapshot(cache)
    for name in ("stats", "tables", "lengths", "padded"):
        assert after[name] == before[name], name
    for now, then in zip(after["keys"], before["keys"], strict=True):
        assert (now is None) == (then is None)
        assert now is None or torch.equal(now, then)
    check_books(cache, *others)


def check_books(*caches: PagedCache) -> None:
    """Assert that the books of a pool agree with the tables of `caches`, which are all that are on it, and of the
    prompts that it keeps."""
    pool = caches[0].pool
    kept = pool.prefixes.tables if pool.prefixes is not None else [[] for _ in pool.allocators]
    for group, allocator in enumerate(pool.allocators):
        held = (table for cache in caches if cache._rows.tables for table in cache._rows.tables[group])
        allocator.check([*held, *kept[group]])


def blocks_for(lengths: Sequence[int], block_size: int, window: int | None = None, last: int = 1) -> int:
    """Blocks that rows of these lengths take when none is shared.

    Args:
        window: of the layers, whose blocks are freed when a step begins that no longer sees them.
        last: tokens of the last step of every row.
    """
    blocks = 0
    for length in map(int, lengths):
        left = 0 if window is None else max(length - last - (window - 1), 0) // block_size
        blocks += -(-length // block_size) - left
    return blocks


def blocks_of(cache: PagedCache, lengths: Sequence[int], last: int = 1) -> int:
    """Blocks that rows of these lengths take over all groups of a cache's layers, when none is shared."""
    return sum(
        blocks_for(lengths, cache.block_size, cache.pool.freed_behind(group), last)
        for group in range(len(cache.pool.groups))
    )


def model_with_mtp_layers() -> PreTrainedModel:
    """A random GLM-4-MoE with two layers and one that drafts (multi-token prediction)."""
    config = Glm4MoeConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        num_mtp_layers=1,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Glm4MoeForCausalLM(config).eval()


@contextlib.contextmanager
def mtp_layers_at_random() -> Iterator[None]:
    """Within, the layers that draft are not read from a checkpoint."""

    def make(cls: type, main_model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return cls(main_model, main_model.config.num_mtp_layers).eval()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpModel, "from_pretrained", classmethod(make))
        yield
