"""The attention function that is registered with transformers as `hf_paged`.

The mask function (`hf_paged.masks`) runs first, on the host, once per forward pass and kind of layer: it sees the
padding mask and begins the step. Each layer's `update` then writes its blocks and leaves a handle on the tensors it
returns. The attention function finds the handle and reads the blocks through the kernel, or takes the dense way where
the kernel does not express what is asked. Without a PagedCache both behave as transformers' own `sdpa`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from hf_paged.host import on_the_host
from hf_paged.kernels.ops import decode_step
from hf_paged.kernels.select import reference
from hf_paged.layer import HANDLE, Handle, PagedLayer
from hf_paged.masks import IMPLEMENTATION, SAYS_MORE
from hf_paged.packed import PackedHandle, running
from hf_paged.plan import StepPlan
from hf_paged.step_cache import NoKernelError, StepHandle

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
    handle: Handle | StepHandle | PackedHandle | None = getattr(key, HANDLE, None)
    if handle is None:
        if not torch.compiler.is_compiling():  # no graph is made of a packed step
            _refuse_in_packed_step(module, query)
        return dense_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    attend = _ATTEND[type(handle)]
    return attend(handle, module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)


def _refuse_in_packed_step(module: torch.nn.Module, query: torch.Tensor) -> None:
    cache = running.get()
    if cache is not None and query.shape[2] == cache.step.num_tokens:
        cache.check_read()
        raise NotImplementedError(f"{type(module).__name__} attends to keys that are not in the cache")


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
        and _kernels_express(asked, layer.window, dropout)
        and query.shape[2] == step.q_len
        and (step.q_len == 1 or is_causal is not False)
        and layer.backend.unsupported(query.dtype, layer.storage) is None
    ):
        plan = step.on(group, query.device)
        options = _options(asked, query, scaling)
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
        or not _kernels_express(asked, layer.window, dropout)
        or query.dtype != layer.blocks.dtype
    ):
        raise NoKernelError(f"{type(module).__name__} asks for attention that no kernel expresses")
    handle.cache.unread = None
    options = _options(asked, query, scaling)
    output = decode_step(
        query,
        handle.key,
        handle.value,
        layer.blocks,
        layer.value_blocks,
        layer.group.block_table,
        layer.group.positions,
        options["sinks"],
        options["alibi_slopes"],
        options["scale"],
        options["softcap"],
        options["window"],
    )
    return output, None


def _attend_packed(
    handle: PackedHandle,
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
    """A layer of a packed step: each segment through the kernels, as a batch of its own."""
    cache, layer = handle.cache, handle.layer
    step = cache.step
    if attention_mask is not None:
        raise NotImplementedError(SAYS_MORE)
    asked = _read(module, kwargs, layer.window)
    if (
        getattr(value, HANDLE, None) is not handle
        or layer.group not in cache.plain_groups
        or not _kernels_express(asked, layer.window, dropout)
        or query.shape[2] != step.num_tokens
        or is_causal is False
    ):
        raise NotImplementedError(f"{type(module).__name__} asks for attention that no kernel expresses")
    cache.unread = None
    backend, storage = layer.backend, layer.storage
    if backend.unsupported(query.dtype, storage) is not None:
        backend = reference()
    options = _options(asked, query, scaling)
    parts, new = [], (handle.key.detach(), handle.value.detach())
    for segment in step.segments:
        plan, queries = step.plan(segment, layer.group, query.device), segment.cut(query)
        if segment.q_len == 1:
            part = backend.decode(queries, storage, plan, **options)
        else:
            part = backend.prefill(queries, *map(segment.cut, new), storage, plan, **options)
        parts.append(part.flatten(0, 1))  # [tokens, heads, value_dim]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output[None], None


_ATTEND = {Handle: _attend_on_host, StepHandle: _attend_in_graph, PackedHandle: _attend_packed}
"""Who attends, by who left the handle."""


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


def _kernels_express(asked: _Asked, window: int | None, dropout: float) -> bool:
    """Whether kernels can do what a module asks of a layer with this window."""
    return dropout == 0.0 and not asked.output_attentions and asked.position_bias is None and asked.window == window


def _options(asked: _Asked, query: torch.Tensor, scaling: float | None) -> dict[str, Any]:
    """What kernels are told besides tensors and the plan."""
    return {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": asked.softcap,
        "window": asked.window if asked.local_window is None else asked.local_window,
        "sinks": asked.sinks,
        "alibi_slopes": asked.alibi_slopes,
    }


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
