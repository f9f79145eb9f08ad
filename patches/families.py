"""Models that compute attention in their own code, past transformers' attention interface.

Their attention modules are given forwards of ours, module by module, so that no other model changes. Such a forward
makes queries, keys and values with the module's own projections, stores them, and calls the attention function as other
models do. It only takes over where there is a PagedCache and the plan tells all of the mask; otherwise it calls the
module's own.

A family has a file where it says which forward belongs to which class.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.attention import paged_attention_forward
from hf_paged.cache import PagedCache
from hf_paged.masks import IMPLEMENTATION, STAND_IN, Patched
from hf_paged.packed import PackedCache
from hf_paged.step_cache import StepCache

FAMILIES = ("bloom", "falcon", "gpt_neo", "mpt")
"""Model types that have a file here, and their classes in transformers' module of that name."""


@dataclass(frozen=True)
class Family:
    """What is done with the modules of one model type."""

    forwards: dict[str, Callable]
    """Per class: the forward of ours. The first class is that of the attention of a layer."""
    signatures: dict[str, tuple[str, ...]]
    """Per class: the parameters of the forward that ours takes the place of, as they are known here."""
    takes_none: bool = True
    """Whether the model can do without a mask."""
    refuses: Callable[[torch.nn.Module], str | None] = lambda module: None
    """Says why a module's settings are not served, or nothing."""
    eager_because: Callable[[PreTrainedConfig], str | None] = lambda config: None
    """Says why decode steps of such a model cannot be compiled, or nothing."""


@dataclass
class PatchedModules:
    """What `unpatch_family` puts back."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    configs: list[tuple[torch.nn.Module, PreTrainedConfig]] = field(default_factory=list)


def find_family(model: PreTrainedModel) -> Family:
    """The family of a model that does not use the attention interface.

    Raises:
        NotImplementedError: there is none, or transformers has changed the model, or settings ask for what ours
            does not do; the message names the model.
    """
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise _refusal(model, "")
    family: Family = importlib.import_module(f"hf_paged.patches.{model_type}").FAMILY
    home = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    found = 0
    for number, (name, known) in enumerate(family.signatures.items()):
        cls = getattr(home, name, None)
        if cls is None or _parameters(cls) not in (known, _as_before(known)):
            raise _refusal(model, f"; {name} of this transformers version is not the one known here")
        for module in model.modules():
            if type(module) is cls:
                found += number == 0
                if "forward" in vars(module) and not _is_patched(module):
                    raise _refusal(model, f"; another library has given its {name} a forward already")
                if (reason := family.refuses(module)) is not None:
                    raise _refusal(model, f"; {reason}")
    if found != model.config.num_hidden_layers:
        kinds = sorted({type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__})
        raise _refusal(
            model,
            f"; it has {', '.join(kinds)}, where only transformers' own {next(iter(family.forwards))} is known here",
        )
    return family


def patch_family(model: PreTrainedModel, family: Family, patched: PatchedModules) -> None:
    """Give the modules of a model the family's forwards. What was done is noted in `patched`."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        forward = family.forwards.get(type(module).__name__)
        if forward is None or _is_patched(module):
            continue
        config = vars(module).get("config")
        if config is not None:  # its own forward asks it for the implementation
            if id(config) not in configs:
                configs[id(config)] = copy.copy(config)
                configs[id(config)]._attn_implementation_internal = implementation_before(config)
            patched.configs.append((module, config))
            module.config = configs[id(config)]
        patched.modules.append(module)
        # A deep copy of a bound method is bound to the copy.
        module.forward = types.MethodType(forward, module)


def name_for(config: PreTrainedConfig, family: Family) -> Patched:
    """What the config of an enabled model of the family names as its implementation."""
    return Patched(IMPLEMENTATION, implementation_before(config), family.takes_none, family.eager_because(config))


def unpatch_family(patched: PatchedModules) -> None:
    """Undo `patch_family`."""
    for module in patched.modules:
        if _is_patched(module):
            del module.forward
    for module, config in patched.configs:
        module.config = config


def has_forwards_of_ours(model: PreTrainedModel) -> bool:
    """Whether a model is enabled by way of its family."""
    return isinstance(model.config._attn_implementation, Patched)


def implementation_before(config: PreTrainedConfig) -> str:
    """What a config of a family says, or said before it was enabled."""
    name = config._attn_implementation
    if isinstance(name, Patched):
        return name.before
    return "eager" if name in (None, IMPLEMENTATION) else name


def _is_patched(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, types.MethodType) and forward.__func__.__module__.startswith("hf_paged.")


def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _as_before(names: Sequence[str]) -> tuple[str, ...]:
    """The names as they were before `past_key_values` became `cache`."""
    return tuple("past_key_values" if name == "cache" else name for name in names)


def _refusal(model: PreTrainedModel, more: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(model).__name__} computes attention in its own code instead of through transformers' attention "
        f"interface, so paged attention cannot be enabled for it{more}. A PagedCache works with it as it is: its "
        "layers are handed dense tensors gathered from the blocks"
    )


# What the forwards share ----------------------------------------------------------------------------------------------


def takes_over(cache: Any, attention_mask: torch.Tensor | None) -> bool:
    """Whether a forward of ours is to run, by the cache and mask that the module was given. Any real mask is one that
    our mask function has not made, or says more than the plan: then the layer's own forward gets dense tensors."""
    if isinstance(cache, StepCache | PackedCache):
        return True
    return isinstance(cache, PagedCache) and (attention_mask is None or hasattr(attention_mask, STAND_IN))


def attend(
    module: torch.nn.Module,
    cache: PagedCache | StepCache | PackedCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Store keys and values, and attend.

    Args:
        layer: the module's index in the cache.
        query: `[rows, heads, q_len, head_dim]`
        key, value: `[rows, kv_heads, q_len, head_dim]`, of the new tokens.
        dropout: of the attention weights, when training.
        options: as for `paged_attention_forward`.

    Returns:
        `[rows, q_len, heads * head_dim]`, and the weights if `output_attentions` is asked for.
    """
    key, value = cache.update(key, value, layer)
    dropout = dropout if module.training else 0.0
    output, weights = paged_attention_forward(module, query, key, value, None, dropout=dropout, **options)
    return output.flatten(2), weights


_slopes: dict[tuple[int, torch.device, torch.dtype], torch.Tensor] = {}


def alibi_slopes(heads: int, device: torch.device, rounded_to: torch.dtype = torch.float32) -> torch.Tensor:
    """`[heads]` float32: the slopes of ALiBi (arXiv 2108.12409). They fall geometrically to 2^-8; where the number of
    heads is no power of two, the rest are every other one of those for twice as many."""
    known = _slopes.get((heads, device, rounded_to))
    if known is None:
        whole = 1 << int(math.log2(heads))
        powers = [8 * (i + 1) / whole for i in range(whole)] + [4 * (2 * i + 1) / whole for i in range(heads - whole)]
        with torch.inference_mode(False):
            known = torch.tensor([2.0**-power for power in powers], dtype=torch.float32).to(rounded_to)
            known = _slopes[heads, device, rounded_to] = known.to(device, torch.float32)
    return known
