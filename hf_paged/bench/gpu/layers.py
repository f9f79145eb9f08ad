"""Keys, values and queries for the timings: rows of equal length, in as many layers as are to take turns."""

from __future__ import annotations

import torch

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.sizes import Shape
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage


class Layers:
    """Several layers of random keys and values under one shuffled block table, and a query for each row.

    Attributes:
        query: `[batch, heads, q_len, dim]`.
    """

    def __init__(
        self, bench: Bench, shape: Shape, batch: int, length: int, block_size: int = 16, count: int = 1, q_len: int = 1
    ) -> None:
        device, blocks = bench.device, -(-length // block_size)
        self.storages = [
            LayerStorage(
                batch * blocks, block_size, shape.kv_heads, shape.dim, shape.dim, shape.dtype, shape.dtype, device
            )
            for _ in range(count)
        ]
        for storage in self.storages:
            storage.kv.normal_()
        generator = torch.Generator().manual_seed(0)
        table = torch.randperm(batch * blocks, generator=generator).int().view(batch, blocks).to(device)
        positions = torch.arange(length - q_len, length, dtype=torch.int32, device=device).repeat(batch, 1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.plan = GroupPlan(table, lengths, positions, length)
        self.query = torch.randn(batch, q_len, shape.heads, shape.dim, device=device).to(shape.dtype).transpose(1, 2)
