"""Figures for Prometheus: the text that a scrape of a server is answered with.

```python
@app.get("/metrics")
def metrics():
    return Response(prometheus_text(batcher), media_type=CONTENT_TYPE)
```

The text exposition format is small (version 0.0.4, which every Prometheus and OpenTelemetry collector reads), so it is
written here, and nothing needs to be installed or registered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.cache import PagedCache
from hf_paged.pool import BlockPool
from hf_paged.recording import pool_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class _Sample(NamedTuple):
    name: str
    kind: Literal["gauge", "counter"]
    help: str
    value: int | float
    labels: dict[str, str]


def prometheus_text(
    target: PagedCache | BlockPool | ContinuousBatcher | Mapping[str, PagedCache | BlockPool | ContinuousBatcher],
    *,
    labels: Mapping[str, Any] | None = None,
) -> str:
    """All figures of a cache, a pool or a batcher as they are now.

    Sizes are in `_bytes`, times in `_seconds`, and what only grows ends in `_total`. Figures of a pool are given for
    each group of layers, in the label `group`.

    Args:
        target: what to tell of; or several, by a name that becomes the label `name`.
        labels: to put on every figure.

    Returns:
        Text in the exposition format 0.0.4; answer with the content type `CONTENT_TYPE`.

    Raises:
        TypeError: something else was passed.
        ValueError: the name of a label is none that Prometheus takes, or one that is used here.
    """
    common = {str(name): str(value) for name, value in (labels or {}).items()}
    for name in common:
        if not _LABEL_NAME.fullmatch(name) or name.startswith("__") or name in ("group", "state", "reason", "name"):
            raise ValueError(
                f"{name!r} cannot be a label: letters, digits and _ make a name, and group, state, reason and name are "
                "used already"
            )
    targets = target.items() if isinstance(target, Mapping) else [(None, target)]
    families: dict[str, list[_Sample]] = {}
    for name, one in targets:
        own = common if name is None else common | {"name": str(name)}
        for sample in _samples(one):
            families.setdefault(sample.name, []).append(sample._replace(labels=own | sample.labels))
    lines = []
    for name, samples in families.items():
        lines += [f"# HELP {name} {_escape_help(samples[0].help)}", f"# TYPE {name} {samples[0].kind}"]
        lines += [f"{name}{_labels(sample.labels)} {_number(sample.value)}" for sample in samples]
    return "".join(line + "\n" for line in lines)


def _samples(target: PagedCache | BlockPool | ContinuousBatcher) -> Iterator[_Sample]:
    pool = pool_of(target)
    yield from _of_pool(pool)
    if isinstance(target, PagedCache):
        yield from _of_cache(target)
    elif isinstance(target, ContinuousBatcher):
        yield from _of_batcher(target)


def _of_pool(pool: BlockPool) -> Iterator[_Sample]:
    with pool.lock:
        yield _gauge("block_tokens", "Tokens that a block holds.", pool.block_size)
        yield _gauge("pool_reserved_bytes", "Bytes of the pool's tensors.", pool.reserved_bytes)
        for number, (group, blocks) in enumerate(zip(pool.groups, pool.allocators, strict=False)):
            of_group = {"group": group.name}
            states = {"used": blocks.num_used, "kept": blocks.num_idle}
            states["free"] = blocks.num_blocks - sum(states.values())
            for state, value in states.items():
                yield _gauge(
                    "pool_blocks",
                    "Blocks of the pool: used, kept (of prompts for later; they give way), or free.",
                    value,
                    of_group | {"state": state},
                )
            yield _gauge("pool_blocks_limit", "Blocks of the pool in all.", blocks.num_blocks, of_group)
            yield _gauge("pool_blocks_shared", "Used blocks that several sequences hold.", blocks.num_shared, of_group)
            yield _gauge("pool_blocks_peak", "The most blocks that were used at once.", blocks.peak_used, of_group)
            used = blocks.num_used * pool.bytes_per_block(number)
            yield _gauge("pool_used_bytes", "Bytes of the blocks that are used.", used, of_group)


def _of_cache(cache: PagedCache) -> Iterator[_Sample]:
    stats = cache.stats()
    yield _gauge("cache_rows", "Rows of the cache.", max(cache.batch_size, 0))
    yield _gauge("cache_tokens", "Tokens stored in all rows of the cache, padding not counted.", stats.tokens)
    yield _gauge("cache_token_bytes", "Bytes that hold a token of the cache.", stats.token_bytes)
    yield _gauge("cache_waste_ratio", "Share of the slots in the cache's blocks that hold no token.", stats.waste)


def _of_batcher(batcher: ContinuousBatcher) -> Iterator[_Sample]:
    stats = batcher.stats()
    for state, value in {"waiting": stats.waiting, "running": stats.running}.items():
        yield _gauge("requests", "Requests that have not ended.", value, {"state": state})
    yield _gauge("requests_running_peak", "The most requests that ran at once.", stats.peak_running)
    ended = {"finished": stats.finished, "error": stats.failed, "cancelled": stats.cancelled}
    for reason, value in ended.items():
        yield _counter(
            "requests_ended_total", "Requests that have ended; a sample counts as one.", value, reason=reason
        )
    yield _counter("preemptions_total", "Times that a request gave its blocks up for an older one.", stats.preemptions)
    yield _counter("steps_total", "Steps of the batch.", stats.steps)
    yield _counter("step_seconds_total", "Time spent in steps.", stats.seconds)
    yield _counter("prompt_tokens_total", "Tokens of prompts that were computed.", stats.prompt_tokens)
    yield _counter("cached_prompt_tokens_total", "Tokens of prompts that were found in blocks.", stats.cached_tokens)
    yield _counter("generated_tokens_total", "Tokens that were generated.", stats.new_tokens)


def _gauge(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> _Sample:
    return _Sample(f"hf_paged_{name}", "gauge", text, value, labels or {})


def _counter(name: str, text: str, value: float, **labels: str) -> _Sample:
    return _Sample(f"hf_paged_{name}", "counter", text, value, labels)


def _labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape_label(value: str) -> str:
    value = value.encode("utf-8", "replace").decode("utf-8")  # lone surrogates would fail the answer to the scrape
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: int | float) -> str:
    return repr(value) if isinstance(value, int) else repr(float(value))
