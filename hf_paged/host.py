"""Keeping what runs on the host between the layers out of graphs that torch.compile makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

REASON = (
    "a PagedCache keeps its books on the host between the layers, so that only its decode steps can be compiled in one "
    "piece. Leave out fullgraph=True, or let generate() compile: enable_paged_attention(model, compile=True)"
)
"""What torch says where it is told to make one graph of all."""


def on_the_host(function: Callable[P, T]) -> Callable[P, T]:
    """A graph breaks around `function`. Where nothing is compiled this costs less than `torch.compiler.disable`."""
    disabled = torch.compiler.disable(function, reason=REASON)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call
