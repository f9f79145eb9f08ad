"""How the Triton kernels are cut for a device: by rule, so that nothing is searched or measured while a model runs.

The rules come from compiling for each target and reading what came out (`static_guard`), not from trial runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_DECODE_QUERIES = 16  # new tokens a row up to which the decode kernel serves; more are a prefill
BLOCK_SIZES = (16, 32, 64, 128, 256)  # a product's shortest side is 16
LARGEST_M = 64  # rows of a decode product
COMBINE_STEP = 16  # splits that are joined at a time


@dataclass(frozen=True)
class Target:
    """What the rules want to know of a device."""

    name: str
    """`sm_90` and the like; AMD's `gfx942`."""
    multiprocessors: int

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm_")

    @property
    def has_small_shared_memory(self) -> bool:
        """Less than 100 KiB a block: consumer and workstation GPUs, and AMD's."""
        return self.name not in ("sm_80", "sm_90", "sm_100", "sm_103")


@dataclass(frozen=True)
class Config:
    """How an attention kernel is cut.

    Attributes:
        m: queries of a product.
        tile: tokens between two rescalings of the softmax.
        warps, stages: the compiler's `num_warps` and `num_stages`.
    """

    m: int
    tile: int
    warps: int
    stages: int


def parts(dim: int, itemsize: int, target: Target) -> tuple[int, int]:
    """Two powers of two, of 16 at least and 512 bytes at most, that hold a head dim; the second is 0 if one does."""
    if dim < 32:
        return next_power_of_2(dim), 0
    first = min(1 << (dim.bit_length() - 1), 512 // itemsize)
    rest = dim - first
    # Warps of 64 lanes would load narrower parts by less than 16 bytes a lane.
    return first, 0 if rest <= 0 else max(16 if target.is_nvidia else 32, next_power_of_2(rest))


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def decode_config(target: Target, key_dim: int, value_dim: int, itemsize: int, queries: int) -> Config:
    """For `queries` queries of a KV head: the query group times the new tokens."""
    width = next_power_of_2(max(key_dim, value_dim)) * itemsize  # bytes of a vector
    m = min(LARGEST_M, max(16, next_power_of_2(queries)))
    if not target.is_nvidia:
        config = Config(m, max(16, min(64, (8 << 10) // width)), 4, 2)
    elif itemsize == 4:  # such products hold their operands twice
        if width >= 512:
            config = Config(16, 16, 2, 3) if width == 512 else Config(16, 16, 4, 2)
        else:
            config = Config(16, 64, 2, 3) if m == 16 and width <= 128 else Config(min(m, 32), 32, 4, 3)
    else:
        # So many bytes a tile that three programs or more share a multiprocessor. Two warps, since what all warps do
        # alike (ids, offsets, the softmax of 16 queries) is most of the loop.
        tile = (8 << 10 if target.has_small_shared_memory else 16 << 10) // width
        config = Config(m, max(16, min(128, tile)), 2 if m == 16 else 4, 3)
    return _widened(config, target, key_dim, value_dim, itemsize)


def combine_warps(value_dim: int) -> int:
    return 8 if value_dim > 128 else 4


def prefill_config(target: Target, key_dim: int, value_dim: int, itemsize: int) -> Config:
    """For many queries of one query head."""
    width = next_power_of_2(max(key_dim, value_dim)) * itemsize
    large = target.name in ("sm_90", "sm_100", "sm_103")
    if itemsize == 4 and target.is_nvidia:
        if width == 512:
            config = Config(16, 16, 4 if max(key_dim, value_dim) == 96 else 2, 3)  # whichever does not spill
        else:
            config = {256: Config(64, 16, 4, 3), 1024: Config(16, 16, 8, 2)}.get(width, Config(32, 32, 4, 3))
    elif width >= 512:
        config = Config(128, 32, 8, 2) if large else Config(32, 32, 4, 2)
    elif width <= 32:
        config = Config(64, 128, 4, 3)
    else:
        config = Config(128, (64 if width == 256 else 128) if large else 32, 8, 3)
    if not target.is_nvidia:
        config = replace(config, warps=4, stages=2)
    return _widened(config, target, key_dim, value_dim, itemsize)


def _widened(config: Config, target: Target, key_dim: int, value_dim: int, itemsize: int) -> Config:
    """With so many bytes in each part of a tile that every thread loads 16 at a time."""
    narrowest = min(part for dim in (key_dim, value_dim) for part in parts(dim, itemsize, target) if part)
    lanes = 32 if target.is_nvidia else 64
    while config.tile * narrowest * itemsize < 16 * lanes * config.warps:
        if config.warps > 4:
            config = replace(config, m=min(64, config.m), warps=4)
        elif config.warps > 2 and config.m == 16:
            config = replace(config, warps=2)
        else:
            config = replace(config, tile=2 * config.tile)
    return config


def num_splits(target: Target, rows: int, kv_heads: int, longest: int, tile: int) -> int:
    """Into how many pieces each row is cut: enough for two programs a multiprocessor, but of four tiles at least."""
    wanted = -(-2 * target.multiprocessors // (rows * kv_heads))
    limit = min(next_power_of_2(-(-target.multiprocessors // 4)), -(-longest // (4 * tile)))
    return max(1, min(wanted, limit))
