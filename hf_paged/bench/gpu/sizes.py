"""How large everything is: on a GPU, and at toy size in Triton's interpreter."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """An attention layer."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values a token."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def flops(self, length: int) -> float:
        """Of causal attention over a row."""
        return 4 * self.heads * self.dim * length * (length + 1) / 2


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        copy_bytes: of the copy that gives the bandwidth.
        rotation_bytes: read before the same bytes are read again; at least twice the L2 cache on a GPU.
        max_layers: that take turns for that.
        repeats: readings of the clock of which the median is taken.
        compile_threads: kernels that are compiled at a time.
        decode_lengths, prompt_lengths: of the rows in the correctness cases.
        points: (batch, length) of decode.
        sweep: (batch, length) at which other cuts are tried, and `sweep_cuts` (tile, warps, stages) those.
        blocks_point: (batch, length) at which block sizes are compared.
        moved_tokens, copied_blocks: for the bandwidth of writing and copying.
        prompts: (rows, tokens) of prefill.
        model: arguments of the config of a Llama.
        runs: timed calls of generate(), of each cache.
        compile_cap: seconds for each of PagedCache and StaticCache compiled, compilation included.
        many: requests, their longest prompt and their longest answer.
        host_calls: for the cost of a call on the host.
    """

    copy_bytes: int
    rotation_bytes: int
    max_layers: int
    repeats: int
    compile_threads: int
    layer: Shape
    dtypes: tuple[torch.dtype, ...]
    decode_lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    decode_cases: int
    prefill_cases: int
    points: tuple[tuple[int, int], ...]
    sweep: tuple[tuple[int, int], ...]
    sweep_cuts: tuple[tuple[int, int, int], ...]
    block_sizes: tuple[int, ...]
    blocks_point: tuple[int, int]
    moved_tokens: int
    copied_blocks: int
    prompts: tuple[tuple[int, int], ...]
    model: dict[str, Any]
    model_dtype: torch.dtype
    batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    runs: int
    compile_cap: float
    many: tuple[int, int, int]
    host_calls: int


GPU_SIZES = Sizes(
    copy_bytes=2 << 30,
    rotation_bytes=256 << 20,
    max_layers=128,
    repeats=20,
    compile_threads=16,
    layer=Shape(heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    decode_lengths=(1, 0, 15, 17, 1000, 2049, 4096),
    prompt_lengths=(1500, 0, 37, 700),
    decode_cases=22,
    prefill_cases=12,
    points=tuple(itertools.product((1, 8, 64, 256), (512, 4096, 32768))),
    sweep=((8, 4096), (64, 4096)),
    sweep_cuts=tuple(itertools.product((32, 64, 128), (2, 4), (2, 3, 4))),
    block_sizes=(16, 32, 64, 128, 256),
    blocks_point=(64, 4096),
    moved_tokens=1024,
    copied_blocks=4096,
    prompts=tuple(itertools.product((1, 4), (1024, 4096, 16384))),
    model={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 20,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    model_dtype=torch.bfloat16,
    batches=(1, 8, 32),
    prompt=1024,
    new_tokens=64,
    runs=3,
    compile_cap=90.0,
    many=(128, 1024, 256),
    host_calls=1000,
)


# No bfloat16, whose products are wrong in the interpreter.
TOY_SIZES = Sizes(
    copy_bytes=1 << 20,
    rotation_bytes=0,
    max_layers=2,
    repeats=1,
    compile_threads=1,
    layer=Shape(heads=4, kv_heads=2, dim=32, dtype=torch.float16),
    dtypes=(torch.float16, torch.float32),
    decode_lengths=(1, 0, 15, 40),
    prompt_lengths=(24, 0, 5),
    decode_cases=5,
    prefill_cases=3,
    points=((1, 40), (2, 20)),
    sweep=((2, 40),),
    sweep_cuts=((32, 2, 2), (64, 4, 3)),
    block_sizes=(16, 32),
    blocks_point=(2, 20),
    moved_tokens=4,
    copied_blocks=2,
    prompts=((1, 20), (2, 20)),
    model={
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    },
    model_dtype=torch.float32,
    batches=(2,),
    prompt=18,
    new_tokens=4,
    runs=1,
    compile_cap=20.0,
    many=(3, 16, 4),
    host_calls=3,
)
