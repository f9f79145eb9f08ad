"""The generate() calls that are running."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from hf_paged.cache import PagedCache

SHARES_PROMPTS = "_hf_paged_shares_prompts"
"""Attribute of an enabled model: whether prompts that generate() repeats are computed once."""


@dataclass
class Call:
    """One generate() call that is running."""

    cache: weakref.ref[PagedCache] | None
    """The cache that was passed to it."""
    follows_rows: bool
    """The stopping criteria's verdict is about the rows of that cache."""
    shares_prompts: bool
    assistant_block_size: int | None = None
    """Of the cache that an assistant gets, if its model is enabled."""
    tokenizer: Any = None
    num_beams: int = 1
    repeats: int = 1
    """Into how many rows each prompt was expanded."""
    expanded: tuple[str, ...] = ()
    """The tensors among the model's arguments that were expanded with it."""


_calls = threading.local()


def running_calls() -> list[Call]:
    """The calls of this thread, innermost last."""
    return _calls.__dict__.setdefault("stack", [])


def current_call() -> Call | None:
    stack = running_calls()
    return stack[-1] if stack else None


def cache_of(kwargs: dict[str, Any]) -> PagedCache | None:
    """The PagedCache among the arguments of a forward or generate() call, under either name that transformers gives it;
    of an encoder-decoder's pair of caches, the decoder's own."""
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, PagedCache):
            return cache
    return None
