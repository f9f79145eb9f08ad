"""The cases of the correctness section: which there are, and their keys, values and queries in a pool of blocks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.sizes import GPU_SIZES, Sizes
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

DIMS = ((16, 16), (24, 24), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256),
        (192, 128))  # fmt: skip
GROUPS = (4, 1, 7, 16, 64)
QUERY_LENGTHS = (1, 2, 1, 5, 1, 16, 1)
OPTIONS = ("", "window", "softcap", "sinks", "", "alibi", "window softcap sinks alibi")
SPLITS = (None, 1, 3)


@dataclass(frozen=True)
class Case:
    """Rows of `lengths` tokens, of which the last `new` are written and asked for in this step, padded on the left.

    Attributes:
        kind: `decode` or `prefill`, by kernel.
        dims: of keys and of values.
        options: any of `window`, `softcap`, `sinks` and `alibi`.
        splits: of decode; None for as many as the rule gives.
    """

    kind: str
    dtype: torch.dtype
    dims: tuple[int, int]
    kv_heads: int
    group: int
    block_size: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    options: str = ""
    splits: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def name(self) -> str:
        dims = "/".join(str(dim) for dim in dict.fromkeys(self.dims))
        parts = [self.kind, str(self.dtype).removeprefix("torch."), f"dim {dims}"]
        parts += [f"{self.heads}/{self.kv_heads} heads", f"blocks of {self.block_size}", f"{max(self.new)} new"]
        if self.splits:
            parts.append(f"{self.splits} split" + "s" * (self.splits > 1))
        if any(0 < new < length for new, length in zip(self.new, self.lengths, strict=True)) and self.kind == "prefill":
            parts.append("past")
        return ", ".join([*parts, *self.options.split()])

    def option_values(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of decode and prefill."""
        place = torch.arange(self.heads, dtype=torch.float32, device=device) / self.heads
        values = {
            "window": max(self.lengths) // 3 + 1,
            "softcap": 2.0,
            "sinks": 6 * place - 2,
            "alibi_slopes": torch.exp2(-8 * place - 1),
        }
        wanted = self.options.replace("alibi", "alibi_slopes").split()
        return {name: values[name] for name in wanted}


def correctness_cases(sizes: Sizes) -> list[Case]:
    """Attention cases. The parameters go round in cycles of different lengths, so that values meet in many ways."""
    cases = []
    dtypes, lengths, block_sizes = sizes.dtypes, sizes.decode_lengths, GPU_SIZES.block_sizes
    for i in range(sizes.decode_cases):
        q_len = QUERY_LENGTHS[i % 7]
        cases.append(
            Case(
                "decode",
                dtypes[i % len(dtypes)],
                DIMS[(3 * i + 7) % 11],
                kv_heads=2,
                group=GROUPS[i % 5],
                block_size=block_sizes[(i + i // 5) % 5],
                lengths=lengths,
                new=tuple(min(q_len, length) for length in lengths),
                options=OPTIONS[(i + i // 7) % 7],
                splits=SPLITS[(i + i // 3) % 3],
            )
        )
    lengths = sizes.prompt_lengths
    for i in range(sizes.prefill_cases):
        new = tuple(length - length // 3 if i % 2 else length for length in lengths)  # a third of each row is cached
        cases.append(
            Case(
                "prefill",
                dtypes[i % len(dtypes)],
                DIMS[(4 * i + 7) % 11],
                kv_heads=2,
                group=GROUPS[(i + i // 5) % 4],
                block_size=block_sizes[(i + i // 5) % 5],
                lengths=lengths,
                new=new,
                options=OPTIONS[(i + i // 7) % 7],
            )
        )
    return cases


class Rows:
    """The rows of a case in a pool under a shuffled table, and the same tokens side by side.

    Unused slots and unused blocks hold NaN, table entries past a row's last block are out of range.

    Attributes:
        storage: holds the tokens after `fill`.
        key, value: `[rows, kv_heads, longest, dim]`.
        query: `[rows, heads, q_len, key_dim]`.
        positions: int32 `[rows, q_len]`, -1 at padding.
    """

    def __init__(self, bench: Bench, case: Case) -> None:
        device, rows, longest, q_len = bench.device, len(case.lengths), max(case.lengths), max(case.new)
        self.bench, self.case = bench, case
        generator = torch.Generator().manual_seed(0)
        used = [-(-length // case.block_size) for length in case.lengths]
        num_blocks = sum(used) + 3
        self.storage = LayerStorage(
            num_blocks, case.block_size, case.kv_heads, *case.dims, case.dtype, case.dtype, device
        )
        self.storage.key_blocks.fill_(math.nan)
        self.storage.value_blocks.fill_(math.nan)
        free = iter(torch.randperm(num_blocks, generator=generator).tolist())
        table = torch.full((rows, max(used)), -(2**30), dtype=torch.int32)
        for row, count in enumerate(used):
            table[row, :count] = torch.tensor(list(itertools.islice(free, count)), dtype=torch.int32)
        self.table = table.to(device)
        on_device = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=on_device, device=device).to(case.dtype)

        self.key = random(rows, case.kv_heads, longest, case.dims[0])
        self.value = random(rows, case.kv_heads, longest, case.dims[1])
        self.query = random(rows, q_len, case.heads, case.dims[0]).transpose(1, 2)  # as a projection gives it
        place = torch.arange(q_len) - q_len  # of the last new token: -1
        lengths, new = torch.tensor(case.lengths)[:, None], torch.tensor(case.new)[:, None]
        self.positions = torch.where(-place <= new, place + lengths, -1).int().to(device)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.plan = GroupPlan(self.table, self.lengths, self.positions, longest)

    def fill(self) -> Rows:
        """Write the tokens before this step, then the new ones, under whose padding lies NaN."""
        write, longest = self.bench.kernels.write, self.key.shape[2]
        place = torch.arange(longest, dtype=torch.int32, device=self.table.device)
        before = self.lengths - (self.positions >= 0).sum(1).int()
        positions = torch.where(place < before[:, None], place, -1)
        write(self.storage, self.key, self.value, GroupPlan(self.table, before, positions, longest))
        index = self.positions.clamp(min=0).long()[:, None, :, None]  # [rows, 1, q_len, 1]

        def newest(tokens: Tensor) -> Tensor:
            picked = tokens.gather(2, index.expand(-1, tokens.shape[1], -1, tokens.shape[3]))
            return picked.masked_fill(self.positions[:, None, :, None] < 0, math.nan)

        self.new_key, self.new_value = newest(self.key), newest(self.value)
        write(self.storage, self.new_key, self.new_value, self.plan)
        return self

    def attend(self) -> Tensor:
        """`[rows, q_len, heads, value_dim]`, by the kernels."""
        kernels, case = self.bench.kernels, self.case
        options = {"scale": case.dims[0] ** -0.5, **case.option_values(self.table.device)}
        if case.kind == "decode":
            return kernels.decode(self.query, self.storage, self.plan, splits=case.splits, **options)
        return kernels.prefill(self.query, self.new_key, self.new_value, self.storage, self.plan, **options)
