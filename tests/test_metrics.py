"""Figures for Prometheus: every one is in the text once, under a right name, and is what the statistics say."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest
import torch

from hf_paged import BlockPool, ContinuousBatcher, PagedCache, enable_paged_attention
from hf_paged.metrics import CONTENT_TYPE, prometheus_text
from tests.helpers import VOCAB, build_model, generate, random_prompts

_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\\n]|\\["\\n])*)"')
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


@pytest.fixture(scope="module")
def model():
    return enable_paged_attention(build_model("llama"))


def parse(text: str) -> dict[tuple[str, frozenset], float]:
    """By name and labels, as the format's description has it: HELP and TYPE once for a name, before its samples, which
    stand together."""
    assert text.endswith("\n")
    found, current, kinds = {}, None, {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in kinds and line.split(" ", 3)[3].endswith(".")
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            kinds[name] = kind
        else:
            name, labels, value = _SAMPLE.fullmatch(line).groups()
            assert name == current
            pairs = _LABEL.findall(labels or "")
            pairs = frozenset((k, re.sub(r'\\[\\n"]', lambda m: _ESCAPES[m[0]], v)) for k, v in pairs)
            assert (name, pairs) not in found
            found[name, pairs] = float(value)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    return found


def value(text: str, metric: str, /, **labels: str) -> float:
    return parse(text)[f"hf_paged_{metric}", frozenset(labels.items())]


def test_a_cache_tells_its_statistics(model):
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    ids, mask = random_prompts((5, 11))
    generate(model, ids, mask, cache, max_new_tokens=4)
    text, stats = prometheus_text(cache), cache.stats()
    full = {"group": "full_attention"}
    assert value(text, "pool_blocks", **full, state="used") == stats.used_blocks == 6
    assert value(text, "pool_blocks", **full, state="free") == 58
    assert value(text, "pool_blocks_limit", **full) == 64
    assert value(text, "pool_blocks_peak", **full) == stats.peak_blocks
    assert value(text, "pool_reserved_bytes") == stats.reserved_bytes > 0
    assert value(text, "pool_used_bytes", **full) == stats.used_bytes > 0
    assert value(text, "cache_token_bytes") == stats.token_bytes
    assert value(text, "cache_tokens") == 22 and value(text, "cache_rows") == 2
    assert value(text, "cache_waste_ratio") == stats.waste == pytest.approx(1 / 12)
    assert value(text, "block_tokens") == 4


def test_a_batcher_tells_its_statistics(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=4, max_rows=2) as batcher:
        handles = [batcher.submit(list(range(1, n)), max_new_tokens=5) for n in (9, 9, 12, 13)]
        batcher.step()
        handles[3].cancel()
        text = prometheus_text(batcher)
        assert value(text, "requests", state="running") == batcher.stats().running > 0
        assert value(text, "requests", state="waiting") == batcher.stats().waiting > 0
        assert value(text, "requests_ended_total", reason="cancelled") == 1
        batcher.run()
        after, stats = prometheus_text(batcher), batcher.stats()
    assert value(after, "requests_ended_total", reason="finished") == 3
    assert value(after, "generated_tokens_total") == 15 and value(after, "steps_total") == stats.steps
    assert value(after, "prompt_tokens_total") == stats.prompt_tokens
    assert value(after, "cached_prompt_tokens_total") == stats.cached_tokens > 0
    assert value(after, "step_seconds_total") == stats.seconds > 0
    states = [value(after, "pool_blocks", group="full_attention", state=s) for s in ("used", "kept", "free")]
    assert states[0] == 0 < states[1] and sum(states) == 64
    before, now = parse(text), parse(after)
    assert all(now[key] >= count for key, count in before.items() if key[0].endswith("_total"))


def test_states_of_blocks_add_up_to_the_pool_also_of_hybrid_models():
    hybrid = enable_paged_attention(build_model("gemma2"))
    cache = PagedCache(hybrid.config, num_blocks=32, block_size=4)
    ids, mask = random_prompts((12,))
    generate(hybrid, ids, mask, cache, max_new_tokens=4)
    found = parse(prometheus_text(cache.pool))
    sums = Counter()
    for (name, labels), count in found.items():
        if name == "hf_paged_pool_blocks":
            sums[dict(labels)["group"]] += count
    assert sums == {"sliding_attention(8)": 32, "full_attention": 32}


def test_labels_are_escaped():
    awkward = 'a "quoted" \\ back\\nslash,\nand } a line = more'
    text = prometheus_text(BlockPool(num_blocks=4), labels={"model": awkward})
    assert value(text, "block_tokens", model=awkward) == 16
    assert len(text.splitlines()) == len(prometheus_text(BlockPool(num_blocks=4)).splitlines())


def test_a_label_that_is_no_unicode_text_fails_no_scrape():
    text = prometheus_text({"\udcff": BlockPool(num_blocks=4)}, labels={"path": os.fsdecode(b"caf\xe9")})
    assert value(text.encode().decode(), "block_tokens", path="caf?", name="?") == 16


def test_several_targets_stand_under_one_heading_each(model):
    pool = BlockPool(num_blocks=8)
    caches = {"one": PagedCache(model.config, pool=pool), "two": PagedCache(model.config)}
    text = prometheus_text(caches, labels={"host": "a"})
    assert text.count("# TYPE hf_paged_cache_rows gauge\n") == 1
    assert value(text, "cache_rows", host="a", name="one") == 0 == value(text, "cache_rows", host="a", name="two")


def test_a_pool_without_a_size_has_no_blocks_to_tell_of(model):
    text = prometheus_text(PagedCache(model.config))
    assert value(text, "pool_reserved_bytes") == 0 and "hf_paged_pool_blocks" not in text


@pytest.mark.parametrize("name", ("1st", "a-b", "__mine", "group", "state", "", "näme"))
def test_names_of_labels_that_prometheus_does_not_take_are_refused(name):
    with pytest.raises(ValueError, match="cannot be a label"):
        prometheus_text(BlockPool(num_blocks=4), labels={name: 1})


def test_other_things_are_refused(model):
    with pytest.raises(TypeError, match="not LlamaForCausalLM"):
        prometheus_text(model)


def test_prometheus_own_parser_reads_the_same(model):
    parser = pytest.importorskip("prometheus_client.parser")
    with ContinuousBatcher(model, num_blocks=64, block_size=4) as batcher:
        batcher.submit(torch.randint(1, VOCAB, (9,)), max_new_tokens=5)
        batcher.run()
        text = prometheus_text({"a": batcher, "b": batcher.pool}, labels={"model": 'x"\\\n'})
    theirs = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert theirs == parse(text)
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
