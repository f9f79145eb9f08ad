"""The attention function and the mask function that are registered with transformers as `hf_paged`.

The mask function runs first, on the host, once per forward pass and kind of layer: it sees the padding mask and begins
the step. Each layer's `update` then writes its blocks and leaves a handle on the tensors it returns. The attention
function finds the handle and reads the blocks through the kernel, or takes the dense way where the kernel does not
express what is asked. Without a PagedCache both behave as transformers' own `sdpa`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, eager_mask, sdpa_mask

from hf_paged.cache import CachedLength
from hf_paged.host import on_the_host
from hf_paged.kernels.ops import decode_step
from hf_paged.layer import HANDLE, Handle, PagedLayer
from hf_paged.plan import StepPlan
from hf_paged.step_cache import NoKernelError, StepHandle

IMPLEMENTATION = "hf_paged"
"""The name under which transformers knows us: `attn_implementation="hf_paged"`."""

IGNORED = frozenset(
    {
        # Passed along by models for other implementations or other modules; they do not change what is attended to:
        # order and padding come from the plan of the step, and rotary positions are in the keys already.
        "assistant_tokenizer",
        "cache",
        "cache_position",
        "hidden_states",
        "is_first_iteration",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "tokenizer",
        "use_cache",
    }
)
"""Attention kwargs that need nothing from the kernel."""

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
            "reach it. Load it without attn_implementation, and try enable_paged_attention(model)"
        )
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
    model_classes = MODEL_MAPPING.get(config_class, ())
    model_classes = model_classes if isinstance(model_classes, tuple) else (model_classes,)
    names = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    return any(not any(getattr(model, name, False) for name in names) for model in model_classes)


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

    # Causal order with a window is put together by transformers from closures that cannot be told from those of
    # chunked attention, so the kind of the layer decides. Any overlay asks for vmap or forbids the causal shortcut.
    # (Falcon always forbids it, to have a mask to add its ALiBi to.)
    overlaid = kwargs.get("use_vmap", False) or not (patched is not None or kwargs.get("allow_is_causal_skip", True))
    is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    is_window = layer.kind == "sliding_attention" and kwargs.get("local_size") == layer.window
    plain = not overlaid and (is_causal if layer.kind == "full_attention" else is_window)
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


def _stand_in(kwargs: dict[str, Any]) -> torch.Tensor:
    shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
    mask = torch.zeros((), dtype=torch.bool, device=kwargs.get("device")).expand(shape)
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


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over a paged cache, as transformers calls it.

    Args:
        query: `[rows, heads, q_len, head_dim]`
        key, value: what `PagedCache.update` returned, or any other keys and values.
        attention_mask: what `paged_mask` returned, or a custom mask, which is taken the dense way.
        alibi_slopes: `[heads]` float32, in `kwargs`: what a score loses for each token between query and key.
        local_window: in `kwargs`: only the last that many tokens are seen, although the cache's layer has no window.
            Both are known with a PagedCache only.

    Returns:
        `[rows, q_len, heads, value_dim]`, zeros at padding; and None for the attention weights, unless
        `output_attentions` is asked for.

    Raises:
        NotImplementedError: a keyword argument that is not known, by name.
    """
    handle: Handle | StepHandle | None = getattr(key, HANDLE, None)
    if handle is None:
        return dense_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    attend = _attend_in_graph if isinstance(handle, StepHandle) else _attend_on_host
    return attend(handle, module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)


@on_the_host
def _attend_on_host(
    handle: Handle,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer = handle.layer()
    if layer is None:
        return dense_attention(module, query, key, value, *args, **kwargs)
    try:
        return _attend(layer, handle, module, query, key, value, *args, **kwargs)
    except BaseException:
        if layer.rows.step is handle.step:
            layer.rows.undo_open()
        raise


def _attend(
    layer: PagedLayer,
    handle: Handle,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    step = handle.step
    layer.rows.unread = None
    intact = getattr(value, HANDLE, None) is handle
    if not intact and handle.is_placeholder:
        layer.rows.always_dense = True
        raise RuntimeError(
            f"{type(module).__name__} changed its values after updating the cache, which it had not done before. The "
            "step was undone; run it again, and every layer is handed dense tensors from now on"
        )
    layer.hands_over = layer.rows.pool.hands_over[layer.index] = intact

    asked = _read(module, kwargs, layer.window)
    group = layer.group
    ours = step.masks.get(group)
    left_to_us = attention_mask is None and group in step.build_mask
    if (
        intact
        and not step.must_be_dense
        and group in step.plain_groups
        and (left_to_us or (attention_mask is not None and attention_mask is ours))
        and dropout == 0.0
        and not asked.output_attentions
        and asked.position_bias is None
        and asked.window == layer.window
        and query.shape[2] == step.q_len
        and (step.q_len == 1 or is_causal is not False)
        and layer.backend.unsupported(query.dtype, layer.storage) is None
    ):
        plan = step.on(group, query.device)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = asked.window if asked.local_window is None else asked.local_window
        options = {"scale": scale, "softcap": asked.softcap, "window": window, "sinks": asked.sinks}
        options["alibi_slopes"] = asked.alibi_slopes
        if step.q_len == 1:
            output = layer.backend.decode(query, layer.storage, plan, **options)
        else:
            output = layer.backend.prefill(
                query, handle.key.detach(), handle.value.detach(), layer.storage, plan, **options
            )
        if torch.is_grad_enabled() and (query.requires_grad or handle.key.requires_grad):
            output = _refuse_backward(output, query)
        return output, None

    made_by_us = (group in step.masks and attention_mask is ours) or any(attention_mask is m for m in step.other_masks)
    if not (left_to_us or made_by_us) and layer.rows.has_left_window(group):
        raise NotImplementedError(
            f"{type(module).__name__} was given a mask of its own, but blocks of this layer have left its window of "
            f"{layer.window} tokens and were freed. Use the model with disable_paged_attention(model), or a 2-D "
            "attention_mask"
        )
    if handle.is_placeholder:
        key, value = layer.gather()
    if left_to_us:
        # Some modules are not causal by themselves, and rely on their mask.
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        attention_mask = step.build_mask[group](**({} if causal else {"allow_is_causal_skip": False}))
    position_bias = asked.position_bias
    if asked.alibi_slopes is not None or asked.local_window is not None:
        places = _places(layer, step, query.device)
        if asked.alibi_slopes is not None:
            position_bias = _alibi_bias(places, step, asked.alibi_slopes).to(query.dtype)
        if asked.local_window is not None:
            attention_mask = _local_mask(places, step, asked.local_window, attention_mask)
    return dense_attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout,
        scaling,
        is_causal,
        softcap=asked.softcap,
        s_aux=asked.sinks,
        output_attentions=asked.output_attentions,
        position_bias=position_bias,
    )


def _places(layer: PagedLayer, step: StepPlan, device: torch.device) -> torch.Tensor:
    """`[rows, length]`: the place of each token in its row, counted in tokens that the row sees, as a row alone would
    count; of no meaning at padding."""
    seen = np.ones((len(step.context_lens), step.end), bool)
    stored = layer.rows.stored_positions(step)
    for known in (stored, step.mask):
        if known is not None:
            seen &= known[:, : step.end]
    return torch.from_numpy(seen.cumsum(axis=1)).to(device)


def _alibi_bias(places: torch.Tensor, step: StepPlan, slopes: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, q_len, length]`: what ALiBi adds to the scores (arXiv 2108.12409)."""
    distance = places[:, None, :] - places[:, step.start :, None]  # [rows, q_len, length], negative in the past
    return slopes[:, None, None] * distance[:, None]


def _local_mask(places: torch.Tensor, step: StepPlan, window: int, mask: torch.Tensor | None) -> torch.Tensor:
    """`mask`, or causal order where that is None, with a window of `window` tokens on top."""
    if mask is None:
        mask = torch.ones(step.q_len, step.end, dtype=torch.bool, device=places.device).tril(step.start)
    seen = places[:, None, :] > places[:, step.start :, None] - window
    return mask & seen[:, None]  # [rows, 1, q_len, length]


def _attend_in_graph(
    handle: StepHandle,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """A layer of a compiled decode step. There is no dense way here: whoever runs the graph runs the step again without
    it when this raises."""
    layer = handle.layer
    asked = _read(module, kwargs, layer.window)
    if (
        getattr(value, HANDLE, None) is not handle
        or (attention_mask is not None and attention_mask is not handle.cache.mask)
        or dropout != 0.0
        or asked.output_attentions
        or asked.position_bias is not None
        or asked.window != layer.window
        or query.dtype != layer.blocks.dtype
    ):
        raise NoKernelError(f"{type(module).__name__} asks for attention that no kernel expresses")
    handle.cache.unread = None
    output = decode_step(
        query,
        handle.key,
        handle.value,
        layer.blocks,
        layer.value_blocks,
        layer.group.block_table,
        layer.group.positions,
        asked.sinks,
        asked.alibi_slopes,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        asked.softcap,
        asked.window if asked.local_window is None else asked.local_window,
    )
    return output, None


class _Asked(NamedTuple):
    """What an attention module passes to its attention function besides tensors and mask."""

    softcap: float | None
    sinks: torch.Tensor | None
    window: int | None
    output_attentions: bool | None
    position_bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    local_window: int | None


def _read(module: torch.nn.Module, kwargs: dict[str, Any], window: int | None) -> _Asked:
    """
    Args:
        window: the layer's, where the module passes none.

    Raises:
        NotImplementedError: a keyword argument that is not known, by name.
    """
    softcap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    sinks = kwargs.pop("sinks", None) if sinks is None else sinks
    window = kwargs.pop("sliding_window", window)
    output_attentions = kwargs.pop("output_attentions", None)
    position_bias = kwargs.pop("position_bias", None)
    alibi_slopes, local_window = kwargs.pop("alibi_slopes", None), kwargs.pop("local_window", None)
    for name, argument in kwargs.items():
        if argument is not None and name not in IGNORED:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name}= to its attention function, which paged attention does not "
                "know. Use the model with disable_paged_attention(model); a PagedCache still works then"
            )
    return _Asked(softcap, sinks, window, output_attentions, position_bias, alibi_slopes, local_window)


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over dense keys and values: transformers' `sdpa`, or written out where that cannot do what is asked
    (softcap, sinks, returned weights). Shapes as for `paged_attention_forward`."""
    for name in ("alibi_slopes", "local_window"):
        if kwargs.pop(name, None) is not None:
            raise NotImplementedError(f"{type(module).__name__} passes {name}= without the keys of a PagedCache")
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    weights_wanted = kwargs.pop("output_attentions", None)
    if key.shape[1] != query.shape[1] and not hasattr(module, "num_key_value_groups"):  # by which sdpa would know
        key, value = (repeat_kv(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    if softcap is None and sinks is None and not weights_wanted:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    rows, heads, q_len, dim = query.shape
    group_size = heads // key.shape[1]
    key, value = repeat_kv(key, group_size), repeat_kv(value, group_size)
    scores = (query.float() @ key.float().transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is None and q_len > 1 and causal:
        attention_mask = torch.ones(q_len, key.shape[2], dtype=torch.bool, device=query.device).tril(
            key.shape[2] - q_len
        )
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, heads, 1, 1).expand(rows, heads, q_len, 1)), dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights, dropout, module.training).to(value.dtype)
    output = (weights @ value).transpose(1, 2).contiguous()
    return output, weights if weights_wanted else None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError(
            "a backward pass cannot go through paged attention. Train without a cache (use_cache=False), or run this "
            "forward pass under torch.no_grad()"
        )


_refuse_backward = _Output.apply

AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, paged_mask)
