"""Decode under each block size, and what writing and copying blocks reach."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_paged.bench.gpu.decode import decode_in_graph
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.layers import Layers


def measure_blocks(bench: Bench) -> None:
    recorder, (batch, length) = bench.recorder, bench.sizes.blocks_point
    for block_size in bench.sizes.block_sizes:
        recorder.measure(
            "blocks",
            f"decode {batch} x {length:,}, blocks of {block_size}",
            partial(decode_in_graph, bench, batch, length, block_size),
        )
    recorder.measure("blocks", f"write {batch} x 1", lambda: write_bandwidth(bench, batch, 1))
    many = bench.sizes.moved_tokens
    recorder.measure("blocks", f"write {batch} x {many:,}", lambda: write_bandwidth(bench, batch, many))
    recorder.measure("blocks", f"copy of {bench.sizes.copied_blocks:,} blocks of 16", lambda: copy_bandwidth(bench))


def write_bandwidth(bench: Bench, batch: int, tokens: int) -> dict[str, Any]:
    shape = bench.sizes.layer
    layers = Layers(bench, shape, batch, max(tokens, 16), q_len=tokens)
    options: dict[str, Any] = {"device": bench.device, "dtype": shape.dtype}
    new = torch.randn(2, batch, tokens, shape.kv_heads, shape.dim, **options)
    new = new.transpose(2, 3)  # as a projection gives it
    storage = layers.storages[0]
    seconds = bench.median_seconds(bench.graph(lambda: bench.kernels.write(storage, new[0], new[1], layers.plan)))
    return bench.transfer_figures(2 * batch * tokens * shape.token_bytes, seconds)


def copy_bandwidth(bench: Bench) -> dict[str, Any]:
    shape, count = bench.sizes.layer, bench.sizes.copied_blocks
    storage = Layers(bench, shape, 1, 2 * count * 16).storages[0]
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).tolist()
    pairs = list(zip(order[:count], order[count:], strict=True))
    seconds = bench.median_seconds(bench.graph(lambda: bench.kernels.copy_blocks(storage, pairs)))
    return bench.transfer_figures(2 * count * storage.bytes_per_block, seconds)
