"""Pictures: what is drawn is what the allocator and the recording say, and can be read."""

from __future__ import annotations

import dataclasses
import html
import importlib
import random
import re
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.collections import LineCollection, PatchCollection  # noqa: E402
from matplotlib.colors import to_hex, to_rgb  # noqa: E402

from hf_paged import BlockPool, ContinuousBatcher, PagedCache, enable_paged_attention, record  # noqa: E402
from hf_paged.allocator import BlockTable  # noqa: E402
from hf_paged.pictures import (  # noqa: E402
    colours,
    draw_block_tables,
    draw_mapping,
    draw_occupancy,
    draw_pool,
    draw_timeline,
    text_map,
)
from hf_paged.pictures.blocks import State, block_maps  # noqa: E402
from hf_paged.recording import Span  # noqa: E402
from tests.helpers import build_model, forward, generate, random_prompts  # noqa: E402

FULL = "full_attention"
STYLES = ("default", "dark_background")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    return enable_paged_attention(build_model("llama"))


@pytest.fixture(scope="module")
def beams(model):
    """A beam search and its recording: rows share blocks, and some blocks are free."""
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    ids, mask = random_prompts((13, 30))
    with record(cache, tables=True) as recording:
        generate(model, ids, mask, cache, max_new_tokens=14, num_beams=3)
    return cache, recording


@pytest.fixture(scope="module")
def many(model):
    """About 2,000 blocks of 64 ragged rows, of which three were released, in a pool of 30,000."""
    lengths = random.Random(1)
    cache = PagedCache(model.config, num_blocks=30_000)
    ids, mask = random_prompts([lengths.randint(100, 900) for _ in range(64)])
    with torch.no_grad():
        forward(model, ids, cache, attention_mask=mask)
    cache.release([3, 9, 20])
    return cache


@pytest.fixture(scope="module")
def batch(model):
    """A recording of 16 requests that crowd a small pool."""
    lengths = random.Random(0)
    with ContinuousBatcher(
        model, num_blocks=40, block_size=4, max_step_tokens=32, max_rows=6, prefix_cache=False
    ) as batcher:
        with record(batcher) as recording:
            handles = [
                batcher.submit([lengths.randrange(1, 199) for _ in range(lengths.randint(4, 50))], max_new_tokens=20)
                for _ in range(16)
            ]
            for _ in range(5):
                batcher.step()
            handles[12].cancel()
            batcher.run()
        assert batcher.stats().preemptions
    return recording


def squares(ax) -> Counter:
    """How many patches there are of each face colour; `none` where it has none."""
    found = Counter()
    for collection in ax.collections:
        if isinstance(collection, PatchCollection):
            face = collection.get_facecolor()
            found[to_hex(face[0]).upper() if len(face) and face[0][3] else "none"] += len(collection.get_paths())
    return found


def assert_readable(figure) -> None:
    """Nothing leaves the figure or lies over something else, and text stands out from the ground."""
    figure.draw_without_rendering()
    whole = figure.bbox
    ground = luminance(figure.get_facecolor())
    for ax in figure.findobj(plt.Axes):
        names = [
            tick.label1
            for axis in (ax.xaxis, ax.yaxis)
            for tick in axis.get_major_ticks()
            if tick.label1.get_text() and tick.label1.get_visible()
            if min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        ]
        titles = [t for t in (ax._left_title, ax._right_title, ax.xaxis.label, ax.yaxis.label) if t.get_text()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in names + titles]
        if ax.get_legend() is not None:
            boxes.append(("the legend", ax.get_legend().get_window_extent()))
        for index, (text, box) in enumerate(boxes):
            assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, f"{text!r} leaves the figure"
            assert box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1, f"{text!r} leaves the figure"
            for other, other_box in boxes[index + 1 :]:
                assert not overlap(box, other_box), f"{text!r} lies over {other!r}"
        if ax.get_legend() is not None:
            for other in figure.findobj(plt.Axes):
                assert not overlap(ax.get_legend().get_window_extent(), other.get_window_extent())
        for text in titles + names:
            assert abs(luminance(text.get_color()) - ground) > 0.5
            assert text.get_fontsize() >= 8


def overlap(one, other) -> bool:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width > 1 and height > 1


def luminance(colour) -> float:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


# What blocks are -----------------------------------------------------------------------------------------------------


def test_each_block_is_what_the_allocator_says(beams):
    cache, _ = beams
    allocator, (blocks,) = cache.pool.allocators[0], block_maps(cache)
    tables = cache.block_tables[FULL]
    assert len(blocks.states) == allocator.high_water
    for block, (state, owner) in enumerate(zip(blocks.states, blocks.owners, strict=True)):
        holders = [row for row, table in enumerate(tables) if block in table]
        assert state is {0: State.FREE, 1: State.OWN}.get(len(holders), State.SHARED)
        assert owner == (holders[0] if len(holders) == 1 else None)
    assert blocks.count(State.SHARED) == allocator.num_shared > 0
    assert blocks.count(State.FRESH) == 64 - allocator.high_water


def test_kept_blocks_others_and_a_pool_alone(model):
    pool = BlockPool(num_blocks=64, block_size=4, prefix_cache=True)
    cache, other = (PagedCache(model.config, pool=pool) for _ in range(2))
    ids, mask = random_prompts((9,))
    generate(model, ids, mask, cache, max_new_tokens=4)
    states = block_maps(cache)[0].states
    assert states == [State.OWN] * 3  # also of a prompt that is kept, while a row holds it
    assert block_maps(other)[0].states == [State.OTHER] * 3 == block_maps(pool)[0].states
    assert pool.allocators[0].num_shared == 0
    cache.reset()
    assert block_maps(pool)[0].states == [State.KEPT] * 3
    assert text_map(pool).startswith("+++\n0 of 64 blocks in use") and "+ kept" in text_map(pool)


def test_a_large_pool_is_looked_at_quickly_and_locked_for_less(model):
    """A million blocks: steps of others wait only while the books are copied."""
    pool = BlockPool(num_blocks=1_000_000, block_size=1)
    cache = PagedCache(model.config, pool=pool)
    rows = [BlockTable() for _ in range(500)]
    pool.allocators[0].grow(rows, [2000] * 500)
    cache._rows.tables = [rows]
    lock, held = pool.lock, []

    class Timed:
        def __enter__(self):
            lock.__enter__()
            held.append(time.perf_counter())

        def __exit__(self, *error):
            held.append(time.perf_counter() - held.pop())
            lock.__exit__()

    pool.lock, shares = Timed(), []
    for _ in range(3):  # other work on the machine may fall into one of them
        held.clear()
        began = time.perf_counter()
        (blocks,) = block_maps(cache)
        shares.append(held[0] / (time.perf_counter() - began))
    pool.lock = lock
    assert blocks.count(State.OWN) == 1_000_000 and blocks.owners[-1] == 499
    assert min(shares) < 0.5
    cache._rows.tables = []


# Figures -------------------------------------------------------------------------------------------------------------


def test_the_pool_is_drawn_block_by_block(beams):
    cache, _ = beams
    (blocks,) = block_maps(cache)
    found = squares(draw_pool(cache))
    expected = Counter({colours.SHARED: blocks.count(State.SHARED)})
    expected["none"] = 64 - cache.stats().used_blocks
    for owner in blocks.owners:
        if owner is not None:
            expected[colours.of_sequence(owner)] += 1
    assert found == expected


def test_every_block_of_a_sequence_has_its_letter_also_among_thousands(many):
    ax = draw_pool(many)
    columns, lettered = int(ax.get_xlim()[1]), {}
    for collection in ax.collections:
        if collection.get_gid():
            for x, y in collection.get_offsets():
                lettered[int(y) * columns + int(x)] = collection.get_gid()
    (blocks,) = block_maps(many)
    assert 1900 < len(lettered) == many.stats().used_blocks
    assert "".join(lettered[block] for block in sorted(lettered)) == re.sub(
        r"[·\n]", "", text_map(many).rsplit("\n", 1)[0]
    )
    shown = sum(squares(ax).values())
    assert f"{30_000 - shown:,} more are not drawn" in ax.get_xlabel()
    assert shown < len(blocks.states) + 2 * columns


def test_letters_are_in_their_squares(many):
    """Looked for in the pixels: each square of a sequence has some of its letter's colour, and most of its own."""
    ax = draw_pool(many)
    ax.figure.set_dpi(150)
    ax.figure.canvas.draw()
    pixels = torch.from_numpy(np.array(ax.figure.canvas.buffer_rgba())).int()[..., :3].flip(0)
    columns = int(ax.get_xlim()[1])
    for block, owner in list(enumerate(block_maps(many)[0].owners))[::17]:
        if owner is None:
            continue
        corners = ax.transData.transform(
            [(block % columns + a, block // columns + b) for a, b in ((0.1, 0.9), (0.9, 0.1))]
        )
        (left, bottom), (right, top) = corners.astype(int)
        square, colour = pixels[bottom:top, left:right].reshape(-1, 3), colours.of_sequence(owner)
        for wanted, least in ((colour, 0.3), (colours.ink_on(colour), 0.02)):
            distance = (square - torch.tensor([int(255 * part) for part in to_rgb(wanted)])).abs().amax(1)
            assert (distance < 60).float().mean() > least, (block, wanted)


def test_a_text_map_fits_a_terminal_whatever_the_pool(model):
    cache = PagedCache(model.config, num_blocks=9000, block_size=1)
    with torch.no_grad():
        forward(model, torch.ones((50, 100), dtype=torch.long), cache, logits_to_keep=1)
    lines = text_map(cache).split("\n")
    assert [len(line) for line in lines[:-2]] == [64] * 64
    assert lines[-2] == "and 904 more" and lines[-1].startswith("5,000 of 9,000 blocks in use")


def test_a_pool_that_is_larger_than_can_be_drawn_says_what_is_left_out(model):
    cache = PagedCache(model.config, num_blocks=9000, block_size=1)
    forward(model, torch.ones((8, 1000), dtype=torch.long), cache)
    ax = draw_pool(cache)
    shown = sum(squares(ax).values())
    assert shown < 6000 and f"{9000 - shown:,} more" in ax.get_xlabel()


def test_block_tables_are_drawn_with_their_numbers(beams):
    cache, recording = beams
    for source, tables in ((cache, cache.block_tables[FULL]), (recording.steps[3], None)):
        tables = tables or [list(t) for t in source.block_tables[FULL].values()]
        ax = draw_block_tables(source)
        drawn = [[None] * len(table) for table in tables]
        for text in ax.texts:
            drawn[int(text.get_position()[1])][int(text.get_position()[0])] = int(text.get_text())
        assert drawn == tables
        held = Counter(block for table in tables for block in table)
        shared = sum(count for count in held.values() if count > 1)
        assert squares(ax)[colours.KEPT] == shared
        on_hatching = [text for text in ax.texts if text.get_path_effects()]
        assert Counter(int(text.get_text()) for text in on_hatching) == {b: n for b, n in held.items() if n > 1}


def test_large_block_tables_are_drawn_in_colours_with_a_scale(many):
    ax = draw_block_tables(many)
    (cells,) = (c for c in ax.collections if c.get_array() is not None)
    assert cells.get_array().tolist() == [block for table in many.block_tables[FULL] for block in table]
    assert not ax.texts and len(ax.figure.axes) == 2


def test_arrows_lead_from_logical_to_physical_blocks(beams):
    _, recording = beams
    step = recording.steps[0]
    ax = draw_mapping(step)
    (arrows,) = (c for c in ax.collections if isinstance(c, LineCollection))
    tables = [list(t) for t in step.block_tables[FULL].values()]
    flat = [block for table in tables for block in table]
    assert len(arrows.get_segments()) == len(flat)
    tips = [segment[1][0] for segment in arrows.get_segments()]
    width = ax.get_xlim()[1]
    assert [int(tip / width * (max(flat) + 1)) for tip in tips] == flat


def test_occupancy_is_that_of_the_recording(beams):
    _, recording = beams
    ax = draw_occupancy(recording)
    steps = recording.steps
    tops = {}
    for collection in ax.collections:
        for x, y in collection.get_paths()[0].vertices:
            tops[int(x)] = max(tops.get(int(x), 0), y)
    # A stair holds its height until the next step, so at a step the higher of two is drawn.
    used = [one.used_blocks for one in steps]
    assert [tops[number] for number in range(len(used))] == [
        max(used[max(number - 1, 0)], height) for number, height in enumerate(used)
    ]
    (tokens,) = (line for line in ax.lines if line.get_linestyle() == "--")
    assert tokens.get_ydata()[:-1].tolist() == [one.tokens / 4 for one in steps]
    (peak,) = (line for line in ax.lines if line.get_marker() == "v")
    assert peak.get_ydata()[0] == max(used)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["shared", "used by one", "tokens", "pool"]
    detail = f"at most {max(used)} of 64, at step {recording.peak.number}; {len(used)} steps"
    assert ax.get_title(loc="right") == detail  # no seconds, so it is the same wherever it is drawn
    assert draw_occupancy(recording, by="seconds").get_title(loc="right").startswith(f"{detail} in ")


def test_steps_that_were_undone_are_marked(model):
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    with record(cache) as recording:
        forward(model, torch.ones((1, 5), dtype=torch.long), cache)
        forward(model, torch.ones((1, 5), dtype=torch.long), cache)
        cache.rollback()
    ax = draw_occupancy(recording)
    (undone,) = (line for line in ax.lines if line.get_marker() == "x")
    assert undone.get_xydata().tolist() == [[1, 3]]
    assert "undone step" in [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("by", ("step", "seconds"))
def test_the_timeline_has_a_bar_for_each_span_and_a_mark_for_each_end(batch, by):
    ax = draw_timeline(batch, by=by)
    bars = Counter()
    for collection in ax.collections:
        for path in collection.get_paths():
            bars[tuple(round(float(x), 6) for x in (path.vertices[0, 0], path.vertices[1, 0]))] += 1
    expected = Counter()
    for one in batch.requests:
        for span in one.spans:
            ends = (span.first_step, span.end_step) if by == "step" else (span.start, span.end)
            if ends[0] != ends[1]:  # else it waited for no step, which has no width
                expected[tuple(round(float(end), 6) for end in ends)] += 1
    assert bars == expected
    marks = {line.get_marker(): len(line.get_xdata()) for line in ax.lines}
    assert marks == {"o": 15, "D": 1}
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["waiting", "prompt", "decoding", "preempted", "ended", "cancelled"]
    below = ax.figure.axes[1]
    assert below.get_ylabel() == "blocks" and below.get_xlim() == ax.get_xlim()


@pytest.mark.parametrize(("times", "told"), ((0, ""), (1, ", preempted once"), (2, ", preempted 2 times")))
def test_a_timeline_tells_of_what_there_was(model, times, told):
    with ContinuousBatcher(model, num_blocks=64) as batcher, record(batcher) as recording:
        batcher.submit([1, 2, 3], max_new_tokens=3).result()
    (request,) = recording.requests
    request.spans += [Span("preempted", 0.1, 3, 0.2, 4)] * times
    ax = draw_timeline(recording)
    assert ax.get_title(loc="right") == f"1 request, 3 steps{told}"
    timed = draw_timeline(recording, by="seconds").get_title(loc="right")
    assert timed.startswith("1 request, 3 steps in ") and timed.endswith(f" s{told}")
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    # It waited for no step.
    assert names == ["prompt", "decoding", *["preempted"] * bool(times), "ended"]


def test_what_is_empty_can_be_drawn(model):
    cache = PagedCache(model.config)
    with record(cache) as recording:
        for draw in (draw_pool, draw_block_tables, draw_mapping):
            draw(cache).figure.draw_without_rendering()
        draw_pool(cache.pool).figure.draw_without_rendering()
        for draw in (draw_occupancy, draw_timeline):
            draw(recording).figure.draw_without_rendering()


def test_a_pool_that_no_cache_was_made_on_can_be_drawn():
    for pool in (BlockPool(), BlockPool(num_blocks=8)):
        assert squares(draw_pool(pool)) == {}
        assert "no blocks in use yet" in text_map(pool) and "no blocks in use yet" in pool._repr_html_()


def test_without_entries_no_block_is_drawn(model):
    ax = draw_mapping(PagedCache(model.config, num_blocks=8))
    assert squares(ax) == {} and not ax.texts and ax.get_title(loc="right") == "no entries"


@pytest.mark.parametrize(("columns", "step"), ((16, 1), (17, 2), (40, 5), (160, 10), (1000, 100)))
def test_entries_are_counted_in_round_numbers(model, columns, step):
    cache = PagedCache(model.config, num_blocks=columns, block_size=1)
    with torch.no_grad():
        forward(model, torch.ones((1, columns), dtype=torch.long), cache, logits_to_keep=1)
    names = [int(tick.get_text()) for tick in draw_block_tables(cache).get_xticklabels()]
    assert names == list(range(0, columns, step))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("draw", (draw_pool, draw_block_tables, draw_mapping, draw_occupancy))
def test_pictures_can_be_read_on_light_and_dark_grounds(beams, draw, style):
    with plt.style.context(style):
        assert_readable(draw(beams[draw is draw_occupancy]).figure)


@pytest.mark.parametrize("draw", (draw_pool, draw_block_tables))
def test_pictures_of_thousands_of_blocks_can_be_read(many, draw):
    assert_readable(draw(many).figure)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by", ("step", "seconds"))
def test_timelines_can_be_read(batch, by, style):
    with plt.style.context(style):
        assert_readable(draw_timeline(batch, by=by).figure)


def test_they_draw_on_axes_that_are_given(beams, batch):
    cache, recording = beams
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    draws = [(draw_pool, cache), (draw_mapping, cache), (draw_occupancy, recording), (draw_timeline, batch)]
    for (draw, source), ax in zip(draws, axes.flat, strict=True):
        assert draw(source, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    assert_readable(figure)


def test_hybrid_models_have_a_picture_for_each_group():
    hybrid = enable_paged_attention(build_model("gemma2"))
    cache = PagedCache(hybrid.config, num_blocks=32, block_size=4)
    ids, mask = random_prompts((14,))
    generate(hybrid, ids, mask, cache, max_new_tokens=4)
    assert "sliding_attention(8)" in draw_pool(cache).get_title(loc="left")
    assert FULL in draw_block_tables(cache, group=1).get_title(loc="left")
    assert len(draw_block_tables(cache, group=1).texts) == len(cache.block_tables[FULL][0]) == 5


def test_logical_blocks_of_a_window_are_counted_from_the_first_that_is_held(beams):
    hybrid = enable_paged_attention(build_model("gemma2"))
    cache = PagedCache(hybrid.config, num_blocks=32, block_size=4)
    with torch.no_grad():
        for count in (14, 1):
            forward(hybrid, torch.ones((1, count), dtype=torch.long), cache)
    table = cache._rows.tables[0][0]
    assert table.first > 0 and len(table.blocks) == len(draw_block_tables(cache).texts)
    for draw in (draw_block_tables, draw_mapping):
        assert "counted from the first that is held" in draw(cache).get_xlabel()
        assert "counted" not in draw(cache, group=1).get_xlabel() + draw(beams[0]).get_xlabel()
        assert_readable(draw(cache).figure)


def test_squares_of_blocks_that_were_never_used_can_be_seen(beams):
    (fresh,) = [one for one in draw_pool(beams[0]).collections if one.get_linestyle()[0][1]]
    assert fresh.get_linewidth()[0] >= 0.6 and fresh.get_alpha() >= 0.7


def test_misuse_is_refused(beams):
    _, recording = beams
    with pytest.raises(TypeError, match="pass a PagedCache"):
        draw_pool(recording)
    for draw in (draw_block_tables, draw_mapping):
        with pytest.raises(TypeError, match="a pool alone does not know whose its blocks are"):
            draw(beams[0].pool)
    for draw in (draw_pool, draw_block_tables, draw_mapping):
        with pytest.raises(ValueError, match="there is no group 1 of layers; this model has 1, counted from 0"):
            draw(beams[0], group=1)
    with pytest.raises(ValueError, match="'step' or 'seconds', not 'hours'"):
        draw_occupancy(recording, by="hours")
    with pytest.raises(ValueError, match="tables=True"):
        draw_block_tables(dataclasses.replace(recording.steps[0], block_tables=None))


def test_matplotlib_is_asked_for_only_when_something_is_drawn(beams, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_paged.pictures")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    pictures = importlib.import_module("hf_paged.pictures")
    cache, recording = beams
    assert "blocks in use" in pictures.text_map(cache)
    for draw in (pictures.draw_pool, pictures.draw_block_tables, pictures.draw_mapping):
        with pytest.raises(ImportError, match=r'pip install "hf-paged\[notebook\]"'):
            draw(cache)
    for draw in (pictures.draw_occupancy, pictures.draw_timeline):
        with pytest.raises(ImportError, match=r'pip install "hf-paged\[notebook\]"'):
            draw(recording)


# Colours -------------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
_DEFICIENCIES = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(colour: str, kind: str) -> torch.Tensor:
    """CIELAB of a colour as seen with a deficiency."""
    rgb = torch.tensor(to_rgb(colour), dtype=torch.double)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = (torch.tensor(_DEFICIENCIES[kind], dtype=torch.double) @ linear).clamp(0, 1)
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = torch.tensor(to_xyz, dtype=torch.double) @ seen / torch.tensor((0.9505, 1.0, 1.089), dtype=torch.double)
    f = torch.where(xyz > 0.008856, xyz.clamp(min=1e-9) ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack((116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])))


@pytest.mark.parametrize("kind", _DEFICIENCIES)
def test_neighbouring_colours_are_told_apart_with_any_colour_vision(kind):
    palette = [lab(colour, kind) for colour in colours.PALETTE]
    for one, other in zip(palette, [*palette[1:], palette[0]], strict=True):
        assert torch.dist(one, other) > 15
    states = [lab(c, kind) for c in (colours.WAITING, colours.PROMPT, colours.DECODING, colours.PREEMPTED)]
    for index, one in enumerate(states):
        assert all(torch.dist(one, other) > 15 for other in states[index + 1 :])


@pytest.mark.parametrize("colour", (*colours.PALETTE, colours.SHARED, colours.OTHER, colours.KEPT))
def test_letters_stand_out_from_their_colour(colour):
    assert abs(luminance(colour) - luminance(colours.ink_on(colour))) > 0.4


# HTML ----------------------------------------------------------------------------------------------------------------


def squares_of(page: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r'<span class="b \w+" title="([^"]*)">', page)]


def tables_of(page: str) -> list[tuple[str, list[int]]]:
    found = re.findall(r"<div>((?:row|request) [\d.]+): ([^/]*(?:</u>[^/]*)*)</div>", page)
    return [(label, [int(block) for block in re.sub(r"</?u>|and .*", "", entries).split()]) for label, entries in found]


def assert_well_formed(page: str) -> None:
    """Each element is closed, in the order in which they were opened."""
    is_open = []
    for end, name, empty in re.findall(r"<(/?)(\w+)[^>]*?(/?)>", page):
        if end:
            assert is_open.pop() == name
        elif not empty:
            is_open.append(name)
    assert not is_open


def test_the_views_of_a_notebook_run_nothing_and_fetch_nothing(beams):
    cache, recording = beams
    (blocks,) = block_maps(cache)
    for target in (cache, cache.pool, recording):
        page = target._repr_html_()
        assert not re.search(r"<script|https?:|src=|@import|url\(|onclick", page)
        assert len(page) < 20_000
        assert_well_formed(page)
        assert target is recording or len(squares_of(page)) == len(blocks.states)
    assert squares_of(cache._repr_html_()) == [blocks.describe(block) for block in range(len(blocks.states))]
    without_styles = re.sub(r"<style>.*</style>|<[^>]*>", "", cache._repr_html_())
    assert text_map(cache, width=10_000).split("\n")[0] in without_styles  # a text map where styles are taken away


def test_the_view_of_a_large_pool_is_cut(model):
    cache = PagedCache(model.config, num_blocks=9000, block_size=1)
    with torch.no_grad():
        forward(model, torch.ones((20, 150), dtype=torch.long), cache, logits_to_keep=1)
    page = cache._repr_html_()
    assert len(squares_of(page)) == 2048 and "and 952 more" in page and len(page) < 150_000
    tables = tables_of(page)
    assert [len(entries) for _, entries in tables] == [48] * 16
    assert "and 102 more" in page and "<div>and 4 more</div>" in page


def test_the_view_of_a_cache_has_its_block_tables(beams, model):
    cache, _ = beams
    page, held = cache._repr_html_(), Counter(block for table in cache.block_tables[FULL] for block in table)
    assert tables_of(page) == [(f"row {row}", table) for row, table in enumerate(cache.block_tables[FULL])]
    assert {int(block) for block in re.findall(r"<u>(\d+)</u>", page)} == {b for b, n in held.items() if n > 1}
    assert "<details>" not in PagedCache(model.config, num_blocks=9)._repr_html_()


def test_the_view_of_a_recording_has_the_blocks_over_its_steps(beams, batch):
    _, recording = beams
    page = recording._repr_html_()
    names = re.findall(r"<title>([^<]*)</title>", page)
    assert names == ["used by one", "shared"]
    assert f"at most {recording.peak.used_blocks} of 64 blocks, at step {recording.peak.number}" in page
    shared = re.search(r'd="M([^"]*)Z"><title>shared', page)[1].split("L")
    assert len(shared) == 4 * len(recording.steps)
    highest = max(max(one.used_blocks, one.held_tokens / 4) for one in recording.steps)
    tops = [float(point.split()[1]) for point in shared[: 2 * len(recording.steps) : 2]]
    assert tops == pytest.approx([110 * (1 - one.used_blocks / highest) for one in recording.steps], abs=0.06)
    assert "requests: 15 length, 1 cancelled" in batch._repr_html_()


def test_the_view_of_a_recording_is_small_whatever_its_length(model):
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    with record(cache) as recording:
        assert "<svg" not in recording._repr_html_()
        forward(model, torch.ones((1, 5), dtype=torch.long), cache)
        assert_well_formed(recording._repr_html_())
    (one,) = recording.steps
    recording._kept = [dataclasses.replace(one, number=number, used_blocks=number % 64) for number in range(2000)]
    recording.num_steps = 2000
    page = recording._repr_html_()
    assert len(page) < 40_000 and page.count("<svg") == 1
    assert_well_formed(page)


def test_the_view_of_a_batcher_has_its_requests(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=4, max_rows=2) as batcher:
        for first, length in ((1, 4), (20, 8), (40, 6)):
            batcher.submit(list(range(first, first + length)), max_new_tokens=6)
        batcher.step()
        batcher.step()
        page = batcher._repr_html_()
        assert "1 waiting, 2 running" in page
        cells = re.findall(r"<td>([^<]*)</td>", page)
        assert [cells[:4], cells[5:9]] == [["0", "4", "2 of 6", "2"], ["1", "8", "2 of 6", "3"]]
        assert [square.split(": ")[1] for square in squares_of(page)].count("request 1") == 3
        batcher.run()
        assert "<table>" not in batcher._repr_html_() and "3 finished" in batcher._repr_html_()


def test_a_pool_says_what_it_is():
    assert repr(BlockPool()) == "BlockPool(blocks=0 of as many as fit, block_size=16)"
    pool = BlockPool(num_blocks=2000, block_size=4, prefix_cache=True)
    PagedCache(build_model("llama").config, pool=pool)
    assert repr(pool) == "BlockPool(blocks=0 of 2,000, kept=0, block_size=4)"
    assert "0 of 2,000 blocks in use" in pool._repr_html_()
