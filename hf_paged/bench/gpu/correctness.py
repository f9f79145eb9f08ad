"""Whether the kernels are right: attention against float64, writes and copies bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.bench.gpu.cases import Case, Rows, correctness_cases
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.results import Result
from hf_paged.bench.gpu.sizes import Sizes
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

EXACT_EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-15}
"""What outputs may differ by, relative to the weighted mean of the values' magnitudes.

Weights and output are rounded to the dtype once each: half a unit in the last place, twice. In float32 the products
are done as three TF32 products, which keep 20 bits; a score of 8, in units of log 2, keeps its exponent to 2^-17
then, and the softcap's difference of two large numbers as much again."""


def measure_correctness(bench: Bench) -> None:
    for case in correctness_cases(bench.sizes):
        bench.recorder.measure("correctness", case.name, partial(check_attention, bench, case))
    for name, check, case in other_cases(bench.sizes):
        bench.recorder.measure("correctness", name, partial(check, bench, case))


def other_cases(sizes: Sizes) -> list[tuple[str, Callable[[Bench, Case], Result], Case]]:
    """The checks that are not of attention's figures, by name."""
    lengths = tuple(min(length, 300) for length in sizes.decode_lengths)
    first, second = sizes.dtypes[:2]
    many = Case(
        "decode", first, (64, 64), 2, 4, 16, sizes.decode_lengths, tuple(min(1, n) for n in sizes.decode_lengths)
    )
    few = replace(many, lengths=lengths, new=tuple(min(3, length) for length in lengths))
    return [
        ("fixed chunks, one row or all", check_chunks, many),
        ("fixed chunks, key 192, value 128", check_chunks, replace(many, dims=(192, 128), dtype=second)),
        ("write", check_write, few),
        ("write, key 40, value 24", check_write, replace(few, dims=(40, 24), dtype=second, block_size=32)),
        ("copy_blocks", check_copy, few),
        ("copy_blocks, key 192, value 128", check_copy, replace(few, dims=(192, 128), dtype=second)),
    ]


def check_attention(bench: Bench, case: Case) -> Result:
    """One case against float64."""
    rows = Rows(bench, case).fill()
    out, options = rows.attend(), case.option_values(bench.device)
    epsilon = EXACT_EPSILON[case.dtype]
    problems: list[str] = []
    closest = (-1.0, 0.0, 0.0)  # error over allowed, error, allowed
    worst_sdpa: float | None = None
    squares = wrong_squares = 0.0
    if out.isnan().any():
        problems.append("NaN")
    for row, length in enumerate(case.lengths):
        real = rows.positions[row] >= 0
        if (out[row, ~real] != 0).any():
            problems.append(f"row {row} is not zero at padding")
        if not real.any():
            continue
        expected, spread = exact_attention(
            rows.query[row, :, real],
            rows.key[row, :, :length],
            rows.value[row, :, :length],
            rows.positions[row, real],
            case.dims[0] ** -0.5,
            **options,
        )
        difference = out[row, real].double() - expected
        error, allowed = difference.abs().max().item(), epsilon * spread.max().item()
        sdpa = sdpa_of_row(rows, row, real, options)
        if sdpa is not None:
            sdpa_error = (sdpa.double() - expected).abs().max().item()
            worst_sdpa = max(worst_sdpa or 0.0, sdpa_error)
            allowed = max(allowed, 2 * sdpa_error)
        closest = max(closest, (error / allowed if math.isfinite(error) else math.inf, error, allowed))
        squares += expected.square().sum().item()
        wrong_squares += difference.square().sum().item()
    relative = math.sqrt(wrong_squares / squares)
    if not closest[0] <= 1:
        problems.append("error")
    if not relative <= 2 * epsilon:
        problems.append("root mean square")
    values = {
        "max_error": closest[1],
        "allowed": closest[2],
        "sdpa_max_error": worst_sdpa,
        "relative_rms": relative,
        "wrong": "; ".join(problems) or None,
    }
    return Result("", "", values, passed=not problems)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one row in float64.

    Args:
        query: `[heads, tokens, key_dim]`, at `positions` `[tokens]`.
        key, value: `[kv_heads, length, dim]`.

    Returns:
        Outputs `[tokens, heads, value_dim]`, and in the same shape the weighted means of the values' magnitudes.
    """
    heads, kv_heads, length = query.shape[0], key.shape[0], key.shape[1]
    place, where = torch.arange(length, device=key.device), positions[:, None]
    seen = place <= where
    if window is not None:
        seen &= place > where - window
    outputs, spreads = [], []
    for head in range(heads):  # one at a time, for the scores of all may not fit
        wide_value = value[head * kv_heads // heads].double()
        scores = query[head].double() @ key[head * kv_heads // heads].double().T * scale  # [tokens, length]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[head].double() * (where - place)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(len(scores), 1)], dim=1)
        weights = torch.softmax(scores, dim=1)[:, :length]
        outputs.append(weights @ wide_value)
        spreads.append(weights @ wide_value.abs())
    return torch.stack(outputs, 1), torch.stack(spreads, 1)


def sdpa_of_row(rows: Rows, row: int, real: Tensor, options: dict[str, Any]) -> Tensor | None:
    """`[tokens, heads, value_dim]` by torch's SDPA in the case's dtype, or None where that cannot express it."""
    if any(name in options for name in ("softcap", "sinks", "alibi_slopes")):
        return None
    length, positions = rows.case.lengths[row], rows.positions[row, real][:, None]
    place = torch.arange(length, device=positions.device)
    mask = place <= positions
    if "window" in options:
        mask &= place > positions - options["window"]
    try:
        out = F.scaled_dot_product_attention(
            rows.query[row, :, real][None],
            rows.key[row, :, :length][None],
            rows.value[row, :, :length][None],
            attn_mask=mask,
            enable_gqa=rows.case.group > 1,
        )
    except RuntimeError:
        return None
    return out[0].transpose(0, 1)


def check_chunks(bench: Bench, case: Case) -> Result:
    """Under `fixed_chunks`, a row's result does not depend on the others, to the last bit."""
    rows = Rows(bench, case).fill()
    scale = case.dims[0] ** -0.5
    with bench.kernels.fixed_chunks(128):
        together = bench.kernels.decode(rows.query, rows.storage, rows.plan, scale=scale)
        unequal = []
        for row, length in enumerate(case.lengths):
            plan = GroupPlan(
                rows.table[row : row + 1], rows.lengths[row : row + 1], rows.positions[row : row + 1], length
            )
            alone = bench.kernels.decode(rows.query[row : row + 1], rows.storage, plan, scale=scale)
            if not torch.equal(alone[0], together[row]):
                unequal.append(row)
    return Result("", "", {"wrong": f"rows {unequal}" if unequal else None}, passed=not unequal)


def check_write(bench: Bench, case: Case) -> Result:
    """A write stores its tokens, bit by bit, and touches nothing else."""
    rows = Rows(bench, case)
    before = rows.storage.key_blocks.clone(), rows.storage.value_blocks.clone()
    rows.fill()
    for row, length in enumerate(case.lengths):
        for position in range(length):
            block, slot = rows.table[row, position // case.block_size], position % case.block_size
            before[0][block, :, slot] = rows.key[row, :, position]
            before[1][block, :, slot] = rows.value[row, :, position]
    return _same_bits(before, rows.storage)


def check_copy(bench: Bench, case: Case) -> Result:
    """A copy of blocks changes its destinations and nothing else."""
    storage = Rows(bench, case).fill().storage
    last = storage.key_blocks.shape[0] - 1
    pairs = [(0, last), (1, last - 1), (0, last - 2)]
    before = storage.key_blocks.clone(), storage.value_blocks.clone()
    for source, destination in pairs:
        for blocks in before:
            blocks[destination] = blocks[source]
    bench.kernels.copy_blocks(storage, pairs)
    return _same_bits(before, storage)


def _same_bits(expected: tuple[Tensor, Tensor], storage: LayerStorage) -> Result:
    """Whether the blocks of keys and of values are as expected, NaN included."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])

    blocks = (storage.key_blocks, storage.value_blocks)
    equal = all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, blocks, strict=True))
    return Result("", "", {"wrong": None if equal else "other bits"}, passed=equal)
