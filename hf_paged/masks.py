"""The mask function that is registered with transformers as `hf_paged`: it begins the step of a PagedCache, and makes a
mask where the kernel does not know it from the plan.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, eager_mask, sdpa_mask

from hf_paged.cache import CachedLength
from hf_paged.host import on_the_host
from hf_paged.layer import PagedLayer
from hf_paged.layer_kinds import model_classes
from hf_paged.packed import PackedLayer, PackedLength

IMPLEMENTATION = "hf_paged"
"""The name under which transformers knows us: `attn_implementation="hf_paged"`."""
NOT_ROUTED = frozenset(
    {
        "big_bird",
        "bloom",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "led",
        "megatron-bert",
        "mpt",
        "mvp",
        "rembert",
        "roformer",
        "speecht5",
        "trocr",
        "xglm",
    }
)
"""Model types that make their masks through transformers' interface and their attention not. Under our name alone they
would be given masks that they misread."""

SAYS_MORE = "its masks say more than causal order and a sliding window"
"""Why packed steps refuse a mask."""

STAND_IN = "_hf_paged_stand_in"
"""Attribute of a mask that only stands for one; see `Patched`."""


class Patched(str):
    """`hf_paged`, as the config of a model says it whose attention modules hold forwards of ours (see
    `hf_paged.patches.families`).

    Such a model is given no mask where the plan tells all of it, since the forward makes it for the dense way. Whatever
    else it is given, it is given by the implementation that the config named before, whose masks it can read.

    Attributes:
        before: that implementation.
        takes_none: whether the model can pass on None. If not, it is given a bool tensor that stands for a mask.
        eager_because: why its decode steps cannot be compiled, or None.
    """

    before: str
    takes_none: bool
    eager_because: str | None

    def __new__(
        cls, name: str, before: str = "eager", takes_none: bool = True, eager_because: str | None = None
    ) -> Patched:
        self = super().__new__(cls, name)
        self.before, self.takes_none, self.eager_because = before, takes_none, eager_because
        return self


def paged_mask(**kwargs: Any) -> torch.Tensor | None:
    """Begin the step of a PagedCache, and make a mask where the kernel needs one. Arguments as for transformers'
    `sdpa_mask`.

    Returns:
        None where the kernel knows the mask from the plan, else the mask that `sdpa` would get: `[rows, 1, q_len,
        kv_len]` bool, or None where that is plain causal. For a model with forwards of ours see `Patched`.

    Raises:
        NotImplementedError: the model computes attention in its own code, and has not been enabled.
    """
    config, offset = kwargs.get("config"), kwargs.get("q_offset")
    implementation = getattr(config, "_attn_implementation", None)
    patched = implementation if isinstance(implementation, Patched) else None
    if patched is None and implementation == IMPLEMENTATION and config.model_type in NOT_ROUTED:
        raise NotImplementedError(
            f"{config.model_type} computes attention in its own code, so the name {IMPLEMENTATION!r} alone does not "
            "reach it. Load it without attn_implementation: a PagedCache works then, and enable_paged_attention(model) "
            "tells whether the kernels can be used, too"
        )
    if isinstance(offset, PackedLength):
        return _mask_of_packed(offset, patched, kwargs)
    if not isinstance(offset, CachedLength):
        return _mask_without_us(patched, kwargs)
    return _begin_masked(offset, patched, kwargs)


def _mask_without_us(patched: Patched | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    build = _make_mask if patched is None else ALL_MASK_ATTENTION_FUNCTIONS[patched.before]
    return build(**kwargs)


def _make_mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask of layers without a PagedCache, or of those that go the dense way."""
    return eager_mask(**kwargs) if _needs_eager_masks(type(kwargs.get("config"))) else sdpa_mask(**kwargs)


@functools.cache
def _needs_eager_masks(config_class: type) -> bool:
    """Whether models of this config know eager attention only. Code of their own, outside their attention functions,
    may read the masks (NLLB-MoE, BigBird-Pegasus), and takes them for numbers that are added to scores."""
    names = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    return any(not any(getattr(model, name, False) for name in names) for model in model_classes(config_class))


@on_the_host
def _begin_masked(offset: CachedLength, patched: Patched | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    cache = offset.cache()
    if cache is None:
        return _mask_without_us(patched, kwargs)
    kwargs["q_offset"] = int(offset)
    layer = cache.layers[offset.layer]
    if not isinstance(layer, PagedLayer):
        layer = next(layer for layer in cache.layers if isinstance(layer, PagedLayer))
    group = layer.group
    step = cache.begin_step(kwargs["batch_size"], kwargs["q_length"], kwargs.get("attention_mask"))
    kwargs["kv_length"], kwargs["kv_offset"] = step.end, 0  # of all positions, whatever the window
    if kwargs.get("attention_mask") is None and step.mask is not None:
        kwargs["attention_mask"] = torch.from_numpy(step.mask).to(kwargs.get("device", "cpu"))

    plain = _is_plain(layer, patched, kwargs)
    is_window = layer.kind == "sliding_attention"
    if not plain:
        # Always a tensor, never None: a model may make several masks for the same layers, and so it is known which one
        # a layer gets.
        if patched is not None:
            mask = _mask_without_us(patched, kwargs | {"allow_is_causal_skip": False})
        else:
            mask = _whole_mask(layer.window if step.start else None, **kwargs)
        step.other_masks.append(mask)
        return mask
    build = functools.partial(_make_mask if patched is None else sdpa_mask, **kwargs)
    if is_window and (stored := cache.stored_positions(step)) is not None:
        build = functools.partial(_window_mask, stored, layer.window, **kwargs)
    if patched is not None:
        step.plain_groups.add(group)
        step.masks[group], step.build_mask[group] = None, build
        return None if patched.takes_none else _stand_in(kwargs)
    members = [cache.layers[index] for index in cache.pool.groups[group].layers]
    if (
        not step.must_be_dense
        and not layer.rows.always_dense
        and not _needs_eager_masks(type(kwargs.get("config")))
        and all(member.hands_over for member in members)
    ):
        mask = None
        step.unmasked_groups.add(group)
    else:
        mask = build()
        step.unmasked_groups.discard(group)
    step.plain_groups.add(group)
    step.masks[group] = mask
    if mask is None:
        step.build_mask[group] = build
    return mask


def _is_plain(layer: PagedLayer | PackedLayer, patched: Patched | None, kwargs: dict[str, Any]) -> bool:
    """Whether the mask that is asked for says no more than causal order and the layer's window.

    Causal order with a window is put together by transformers from closures that cannot be told from those of chunked
    attention, so the kind of the layer decides. Any overlay asks for vmap or forbids the causal shortcut. (Falcon
    always forbids it, to have a mask to add its ALiBi to.)
    """
    if kwargs.get("use_vmap", False) or not (patched is not None or kwargs.get("allow_is_causal_skip", True)):
        return False
    if layer.kind == "full_attention":
        return kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    return layer.kind == "sliding_attention" and kwargs.get("local_size") == layer.window


def _mask_of_packed(offset: PackedLength, patched: Patched | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """None where the plan of a packed step tells what its tokens see. Else a mask that hides everything: a model may
    make masks for kinds of layers that it does not have, and a layer that does get one is refused."""
    cache = offset.cache()
    layer = cache.layers[offset.layer]
    if layer.kind == "dummy":
        layer = next(layer for layer in cache.layers if layer.kind != "dummy")
    padding = kwargs.get("attention_mask")
    shows_all = padding is None or bool(padding.all())  # some models make one of their own
    if not (shows_all and _is_plain(layer, patched, kwargs)):
        if patched is not None:  # forwards of ours look at no mask
            raise NotImplementedError(SAYS_MORE)
        return _hiding_all(kwargs)
    cache.plain_groups.add(layer.group)
    return None if patched is None or patched.takes_none else _stand_in(kwargs)


def _hiding_all(kwargs: dict[str, Any]) -> torch.Tensor:
    shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
    return torch.zeros((), dtype=torch.bool, device=kwargs.get("device")).expand(shape)


def _stand_in(kwargs: dict[str, Any]) -> torch.Tensor:
    mask = _hiding_all(kwargs)
    setattr(mask, STAND_IN, True)
    return mask


def _whole_mask(window: int | None, **kwargs: Any) -> torch.Tensor:
    """A mask for layers that take the dense way.

    Args:
        window: other caches drop what is outside it, so nobody sees that, whatever the mask says.
    """
    mask = _make_mask(**(kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
    outside = 0 if window is None else kwargs["q_offset"] - window + 1
    if outside > 0:
        mask = mask.clone()
        mask[..., :outside] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask


def _window_mask(stored: np.ndarray, window: int, **kwargs: Any) -> torch.Tensor | None:
    """The mask of a sliding window counted in stored tokens, as the kernels do. transformers counts positions, which is
    not the same where a row has padding between its tokens.

    Args:
        stored: `[rows, kv_length]` bool: which positions have a token in the blocks.
        window: tokens that a query sees, itself included.
    """
    mask = _make_mask(**kwargs)
    if mask is None:
        return mask
    start, end = kwargs["q_offset"], kwargs["q_offset"] + kwargs["q_length"]
    rank = torch.from_numpy(stored.cumsum(axis=1)).to(mask.device)  # [rows, kv_length]
    seen = rank[:, None, :] > rank[:, start:end, None] - window
    causal = causal_mask_function(0, 0, torch.arange(start, end)[:, None], torch.arange(end)).to(mask.device)
    shown = seen & causal
    if kwargs["attention_mask"] is not None:
        shown = shown & kwargs["attention_mask"][:, None, :end]
    shown = shown[:, None]  # [rows, 1, q_length, kv_length]
    return shown if mask.dtype == torch.bool else mask.new_zeros(shown.shape).masked_fill(~shown, mask.min())


AttentionMaskInterface.register(IMPLEMENTATION, paged_mask)
