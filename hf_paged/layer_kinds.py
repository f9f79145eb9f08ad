"""Which layers a model has, as its config says, and which of them are paged."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from hf_paged.pool import LayerGroup

PAGED_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID_KINDS = {"hybrid": "full_attention"}
"""Kinds of layers that have a recurrent state beside attention, and which attention it is."""
STATE_KINDS = ("linear_attention", "conv", "dummy")


def is_recurrent(kind: str) -> bool:
    """Whether a layer of this kind has a state that every token changes, by itself or beside attention."""
    return kind in HYBRID_KINDS or (kind in STATE_KINDS and kind != "dummy")


def layer_kinds(config: PreTrainedConfig) -> tuple[list[str], list[dict]]:
    """The kind of each layer of a model's decoder, and what its cache layer is made with.

    Raises:
        NotImplementedError: there are layers of a kind that cannot be paged; the message names it. Or the model is
            recurrent, and its config does not tell the kinds.
    """
    decoder = config.get_text_config(decoder=True)
    kinds, kwargs = get_layer_types_and_kwargs(decoder)
    if isinstance(kwargs, dict):  # up to transformers 5.17: one dict for all layers
        kwargs = [kwargs if kind not in ("full_attention", "dummy") else {} for kind in kinds]
    unknown = sorted({kind for kind in kinds if kind not in (*PAGED_KINDS, *HYBRID_KINDS, *STATE_KINDS)})
    if unknown:
        raise NotImplementedError(
            f"{decoder.model_type} has layers of kind {', '.join(unknown)}, which PagedCache does not hold yet; use "
            "transformers' own cache for this model"
        )
    if not getattr(decoder, "layer_types", None) and any(
        getattr(model, "_is_stateful", False) for model in model_classes(type(decoder))
    ):  # then full_attention is what transformers takes for granted, not what the config says
        raise NotImplementedError(
            f"{decoder.model_type} is recurrent and keeps its state in its own way, so there is nothing to page; use "
            "transformers' own cache"
        )
    return list(kinds), list(kwargs)


@functools.cache
def model_classes(config_class: type) -> tuple[type, ...]:
    """transformers' models without a head for this config; none where it knows none."""
    try:
        found = MODEL_MAPPING.get(config_class, ())
    except ValueError:  # a few it maps to a class that it does not export, such as VoxtralRealtimeTextConfig
        return ()
    return found if isinstance(found, tuple) else (found,)


def group_layers(kinds: Sequence[str], kwargs: Sequence[dict]) -> list[LayerGroup]:
    """Layers that may share block tables, put together. Layers without attention are in no group."""
    members: dict[tuple[str, int | None], list[int]] = {}
    for index, (kind, kwarg) in enumerate(zip(kinds, kwargs, strict=True)):
        kind = HYBRID_KINDS.get(kind, kind)
        if kind in PAGED_KINDS:
            window = None if kind == "full_attention" else kwarg["sliding_window"]
            members.setdefault((kind, window), []).append(index)
    return [LayerGroup(kind, window, tuple(layers)) for (kind, window), layers in members.items()]
