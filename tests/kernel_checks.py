"""Rows of tokens in a poisoned pool, and attention over them in float64: what every backend is compared with."""

from __future__ import annotations

import math

import torch

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage


class Setup:
    """Rows of tokens in a poisoned pool under a shuffled table, and the same tokens side by side."""

    def __init__(
        self,
        lengths,
        heads=4,
        kv_heads=2,
        key_dim=64,
        value_dim=None,
        block_size=16,
        dtype=torch.float32,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        value_dim = value_dim or key_dim
        self.generator, self.dtype, self.lengths = generator, dtype, lengths
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        used = [-(-length // block_size) for length in lengths]
        num_blocks = sum(used) + 3
        device = torch.device("cpu")
        self.storage = LayerStorage(num_blocks, block_size, kv_heads, key_dim, value_dim, dtype, dtype, device)
        self.storage.key_blocks.fill_(math.nan)
        self.storage.value_blocks.fill_(math.nan)
        free = torch.randperm(num_blocks, generator=generator).tolist()
        self.table = torch.full((len(lengths), max([1, *used])), -(2**30), dtype=torch.int32)
        for row, count in enumerate(used):
            for i in range(count):
                self.table[row, i] = free.pop()
        longest = max(lengths)
        self.key = self.random(len(lengths), kv_heads, longest, key_dim)
        self.value = self.random(len(lengths), kv_heads, longest, value_dim)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def plan(self, positions, lengths=None):
        lengths = self.lengths if lengths is None else lengths
        lens = torch.tensor(lengths, dtype=torch.int32)
        return GroupPlan(self.table, lens, torch.as_tensor(positions).int().contiguous(), max(lengths))

    def fill(self, backend, upto=None):
        """Write the first `upto[row]` tokens of every row."""
        upto = self.lengths if upto is None else upto
        place = torch.arange(self.key.shape[2])
        positions = torch.where(place < torch.tensor(upto)[:, None], place, -1)
        backend.write(self.storage, self.key, self.value, self.plan(positions, upto))
        return self

    def decode_plan(self):
        return self.plan([[length - 1] for length in self.lengths])

    def expected(self, row, query, positions, scale, softcap=None, window=None, sinks=None, alibi_slopes=None):
        """float64 attention of `query [heads, tokens, key_dim]` at given positions: `[tokens, heads, value_dim]`."""
        group = self.heads // self.kv_heads
        key = self.key[row, :, : self.lengths[row]].double().repeat_interleave(group, 0)
        value = self.value[row, :, : self.lengths[row]].double().repeat_interleave(group, 0)
        scores = query.double() @ key.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(key.shape[1])
        where = torch.as_tensor(positions)[:, None]
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * (where - place)
        seen = (place <= where) & (place > where - (window or key.shape[1] + 1))
        weights = scores.masked_fill(~seen, -math.inf).exp()
        mass = weights.sum(-1, keepdim=True)
        if sinks is not None:
            mass = mass + sinks.double().exp()[:, None, None]
        return ((weights / mass) @ value).transpose(0, 1)


def check_decode(backend, setup, cut=None, **options):
    """Compare a decode; `cut` are arguments that say how a backend cuts its work."""
    query = setup.random(len(setup.lengths), 1, setup.heads, setup.key_dim).transpose(1, 2)
    scale = setup.key_dim**-0.5
    assert backend.unsupported(setup.dtype, setup.storage) is None
    out = backend.decode(query, setup.storage, setup.decode_plan(), scale=scale, **options, **(cut or {}))
    assert out.shape == (len(setup.lengths), 1, setup.heads, setup.value_dim)
    assert out.is_contiguous() and out.dtype == setup.dtype
    for row, length in enumerate(setup.lengths):
        if length == 0:
            assert (out[row] == 0).all()
            continue
        expected = setup.expected(row, query[row], [length - 1], scale, **options)
        assert_close(out[row], expected, rounds_weights=backend.name == "triton")


def assert_close(out, expected, rounds_weights=False):
    """Close in the output's dtype. Matrix units round the weights to the values' dtype, too."""
    ulp = torch.finfo(out.dtype).eps
    if out.dtype == torch.float32:
        torch.testing.assert_close(out.double(), expected, rtol=2e-5 if rounds_weights else 1e-5, atol=4e-6)
    elif rounds_weights:
        torch.testing.assert_close(out.double(), expected, rtol=ulp, atol=2 * ulp)
    else:  # half a unit in the last place, and what float32 accumulation may move across a rounding border
        torch.testing.assert_close(out.double(), expected, rtol=0.55 * ulp, atol=2e-6)


PROMPTS = {
    "all new": ([40, 40], [list(range(40))] * 2),
    "left pads": ([40, 3, 17], [list(range(40)), [-1] * 37 + [0, 1, 2], [-1] * 23 + list(range(17))]),
    "right pads": ([40, 3], [list(range(40)), [0, 1, 2] + [-1] * 37]),
    "holes and an empty row": ([38, 0], [[0, -1, *range(1, 20), -1, *range(20, 38)], [-1] * 40]),
    "past": ([60, 140], [list(range(20, 60)), list(range(100, 140))]),
    "past in some rows, with holes": ([60, 38], [list(range(20, 60)), [0, -1, *range(1, 20), -1, *range(20, 38)]]),
    "few behind a past": ([60, 3, 0, 290], [range(55, 60), [-1, -1, 0, 1, 2], [-1] * 5, [-1, 286, 287, 288, 289]]),
    "pads among many behind a past": (
        [90, 75],
        [[*range(60, 75), -1, -1, *range(75, 90)], [-1] * 17 + [*range(60, 75)]],
    ),
    "many behind a past": ([1300], [list(range(100, 1300))]),
}


def prompt_options(names):
    """Options by name, for six heads."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0, 0.0, 0.0625])
    values = {"window": 7, "softcap": 3.0, "sinks": torch.linspace(-2, 4, 6), "alibi_slopes": slopes}
    return {option: values[option] for option in names.split()}


def check_prefill(backend, setup, positions, options, cut=None):
    """Compare a prefill of tokens at `positions` `[rows, q_len]`, behind whatever of the rows is not among them."""
    rows, q_len = positions.shape
    new = (positions >= 0).sum(1).tolist()
    past = [length - count for length, count in zip(setup.lengths, new, strict=True)]
    setup.fill(backend, past)
    key = setup.random(rows, q_len, setup.kv_heads, setup.key_dim).transpose(1, 2)  # what lies under pads is anything
    value = setup.random(rows, q_len, setup.kv_heads, setup.value_dim).transpose(1, 2)
    for row in range(rows):
        real = positions[row] >= 0
        key[row, :, real] = setup.key[row, :, positions[row, real]]
        value[row, :, real] = setup.value[row, :, positions[row, real]]
        key[row, :, ~real] = value[row, :, ~real] = math.nan
    query = setup.random(rows, setup.heads, q_len, setup.key_dim)
    for row in range(rows):
        query[row, :, positions[row] < 0] = math.nan
    plan = setup.plan(positions)
    backend.write(setup.storage, key, value, plan)
    out = backend.prefill(query, key, value, setup.storage, plan, scale=0.1, **options, **(cut or {}))
    assert out.shape == (rows, q_len, setup.heads, setup.value_dim)
    for row in range(rows):
        real = positions[row] >= 0
        assert (out[row, ~real] == 0).all()
        if real.any():
            expected = setup.expected(row, query[row, :, real], positions[row, real], 0.1, **options)
            assert_close(out[row, real], expected, rounds_weights=True)
