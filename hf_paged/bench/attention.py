"""What one attention layer costs in a decode step: paged, and as DynamicCache and SDPA do it.

`python -m hf_paged.bench.attention` prints a few shapes as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_paged.bench.harness import OUT_OF_CACHE, compare
from hf_paged.kernels import cpu
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDS = 9


def measure_attention_layer(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
) -> dict[str, float]:
    """Time one layer of one decode step; variants alternate, and figures are medians over `ROUNDS` rounds.

    Several layers take turns, so that keys and values come from memory as they do in a model.

    Returns:
        In microseconds a layer: `write`, `decode` and `paged` (both) of the CPU kernels; `cat_sdpa`, DynamicCache's
        concatenation and SDPA; `sdpa` alone on contiguous tensors; `read`, a plain sum over as many bytes as the
        layer's K/V has. `speedup`, the median over rounds of cat_sdpa / paged, and its quartiles `speedup_low` and
        `speedup_high`; `bandwidth`, that of read / decode; `bytes` of K/V.
    """
    size = 2 * batch * length * kv_heads * head_dim * dtype.itemsize
    count = max(1, min(64, OUT_OF_CACHE // size))
    layers = [_make_layer(batch, length, heads, kv_heads, head_dim, dtype, block_size) for _ in range(count)]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True, training=False)
    scale = head_dim**-0.5

    def write(layer: SimpleNamespace) -> None:
        cpu.write(layer.storage, layer.new_key, layer.new_value, layer.plan)

    def decode(layer: SimpleNamespace) -> Tensor:
        return cpu.decode(layer.query, layer.storage, layer.plan, scale=scale)

    def paged(layer: SimpleNamespace) -> Tensor:
        write(layer)
        return decode(layer)

    def cat_sdpa(layer: SimpleNamespace) -> Tensor:
        # Kept and let go as by DynamicCache, for memory that comes anew from the system is far slower; but for the
        # oldest token, so that lengths stay equal.
        layer.key = torch.cat([layer.key[:, :, 1:], layer.new_key], dim=-2)
        layer.value = torch.cat([layer.value[:, :, 1:], layer.new_value], dim=-2)
        return sdpa_attention_forward(module, layer.query, layer.key, layer.value, None, scaling=scale)[0]

    def sdpa(layer: SimpleNamespace) -> Tensor:
        return sdpa_attention_forward(module, layer.query, layer.key, layer.value, None, scaling=scale)[0]

    def read(layer: SimpleNamespace) -> Tensor:
        return layer.same_size.sum()

    def over_layers(function: Callable[[SimpleNamespace], object]) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                function(layer)

        return run

    measured = (cat_sdpa, write, decode, paged, sdpa, read)
    with torch.inference_mode():
        comparison = compare(
            {function.__name__: over_layers(function) for function in measured}, repeats=ROUNDS, warmup=2, units=count
        )
    result = {name: 1e6 * timing.median for name, timing in comparison.timings.items()}
    speedup = comparison.ratio("paged")
    result["speedup"] = speedup.median
    result["speedup_low"], result["speedup_high"] = speedup.quartiles
    result["bandwidth"] = comparison.ratio("decode", "read").median
    result["bytes"] = size
    return result


def attention_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Heads, KV heads and head dim."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _make_layer(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> SimpleNamespace:
    def new(count: int) -> Tensor:
        return torch.randn(batch, 1, count, head_dim).to(dtype).transpose(1, 2)  # as a projection gives it

    blocks = -(-length // block_size)
    storage = LayerStorage(batch * blocks, block_size, kv_heads, head_dim, head_dim, dtype, dtype, torch.device("cpu"))
    storage.key_blocks.normal_()
    storage.value_blocks.normal_()
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    dense = torch.randn(2, batch, kv_heads, length, head_dim).to(dtype)
    return SimpleNamespace(
        storage=storage,
        plan=GroupPlan(table, lengths, lengths[:, None] - 1, length),
        query=new(heads),
        new_key=new(kv_heads),
        new_value=new(kv_heads),
        key=dense[0].clone(),  # two tensors, as in DynamicCache
        value=dense[1].clone(),
        same_size=torch.randn(dense.numel() * dtype.itemsize // 4),
    )


if __name__ == "__main__":
    smollm2 = [(1, 128, 9, 3, 64), (1, 4096, 9, 3, 64), (8, 1024, 9, 3, 64), (8, 4096, 9, 3, 64)]
    for shape in [*smollm2, (8, 4096, 32, 8, 128)]:
        for dtype in (torch.float32, torch.bfloat16):
            result = measure_attention_layer(*shape, dtype)
            rounded = {name: round(value, 2) for name, value in result.items()}
            print(json.dumps({"shape": shape, "dtype": str(dtype).removeprefix("torch."), **rounded}), flush=True)
