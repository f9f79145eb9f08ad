"""How a request's tokens are chosen and when it ends, read from its GenerationConfig by generate() itself.

generate() hands what it has prepared to a decoding loop of the caller's own (`custom_generate`). Ours only takes it
down. So a request is validated, filled up with defaults and given its logits processors and criteria exactly as a call
of generate() with the same arguments would be, in every version of transformers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria
from transformers.generation import logits_process as processing

from hf_paged.models import input_device

GENERATE_DOES = "continuous batching does not do it. Use model.generate(..., past_key_values=PagedCache(model.config))"

_MUST_BE = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "is_assistant": False,
    "use_mtp": False,
    "token_healing": False,
    "use_cache": True,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "cache_implementation": None,
    "cache_config": None,
    "prefill_chunk_size": None,
    "compile_config": None,
    "continuous_batching_config": None,
    "guidance_scale": 1,
}
"""Settings of a GenerationConfig that a batch cannot honour, and the value at which they ask for nothing."""

_CACHING = ("cache_implementation", "cache_config", "compile_config")
"""How generate() would cache. A model's own config may say so for all calls; a batch has its pool."""

_NAMED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""What a request may bring besides a GenerationConfig and its settings."""

_BY_ROWS = (
    processing.TemperatureLogitsWarper,
    processing.TopKLogitsWarper,
    processing.TopPLogitsWarper,
    processing.MinPLogitsWarper,
    processing.TypicalLogitsWarper,
    processing.EpsilonLogitsWarper,
)
"""Processors that look at nothing but the scores, each row for itself."""


@dataclass
class Rules:
    """How tokens are chosen, and when it is enough.

    Attributes:
        do_sample: by chance, or else the likeliest.
        processors: change the scores, `[1, vocabulary]`.
        criteria: end the sequence, besides the two that follow.
        eos_tokens: end the sequence.
        max_length: tokens with the prompt, at most.
        num_samples: of the prompt.
        together: requests with an equal one may have their scores processed as one batch; None where they may not.
    """

    do_sample: bool
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    eos_tokens: frozenset[int]
    max_length: int
    num_samples: int
    together: tuple | None

    def start_clock(self) -> None:
        """Time limits count from now."""
        import time

        for criterion in self.criteria:
            if isinstance(criterion, MaxTimeCriteria):
                criterion.initial_timestamp = time.time()


def read_rules(model: PreTrainedModel, prompt_ids: list[int], options: dict[str, Any]) -> Rules:
    """What generate() would do with these options.

    Args:
        model: enabled for paged attention.
        prompt_ids: at least one.
        options: keyword arguments of generate().

    Raises:
        NotImplementedError: an option that a batch cannot honour, by name.
        TypeError: an option that is misspelt.
        ValueError: what generate() itself refuses.
    """
    allowed = {*vars(GenerationConfig()), *_NAMED, "generation_config", "tokenizer"}
    for name, value in options.items():
        if name not in allowed and value is not None:
            meant = difflib.get_close_matches(name, allowed, n=1, cutoff=0.8)
            if meant and name not in _known_elsewhere(model):
                raise TypeError(f"{name}= is not known; did you mean {meant[0]}=?")
            raise NotImplementedError(f"{name}= was given: {GENERATE_DOES}")
    taken: dict[str, Any] = {}

    def take_down(model: Any, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        taken.update(prepared)
        return input_ids

    config = options.get("generation_config") or model.generation_config
    quiet = {}
    if options.get("use_cache", getattr(options.get("generation_config"), "use_cache", None)) is None:
        quiet["use_cache"] = True  # some models' own settings do without
    if options.get("pad_token_id", config.pad_token_id) is None:
        quiet["pad_token_id"] = 0  # nothing is padded, and generate() need not say that it chose one
    ids = torch.tensor([prompt_ids], dtype=torch.long, device=input_device(model))
    _refuse(config, options | quiet, () if options.get("generation_config") is not None else _CACHING)
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=take_down, **(options | quiet))
    config = taken["generation_config"]
    _refuse(config, {}, _CACHING)

    processors, criteria = taken["logits_processor"], taken["stopping_criteria"]
    eos_tokens: set[int] = set()
    lengths, rest = [config.max_length], StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos_tokens.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        else:
            rest.append(criterion)
    together = None
    if config.do_sample and all(type(processor) in _BY_ROWS for processor in processors):
        together = tuple((type(p).__name__, *sorted(vars(p).items())) for p in processors)
    return Rules(
        do_sample=bool(config.do_sample),
        processors=processors,
        criteria=rest,
        eos_tokens=frozenset(eos_tokens),
        max_length=max(min(lengths), len(prompt_ids) + 1),  # generate() chooses one token before it asks
        num_samples=config.num_return_sequences or 1,
        together=together,
    )


def _known_elsewhere(model: PreTrainedModel) -> set[str]:
    """Arguments of generate() and of the model."""
    return {*inspect.signature(model.generate).parameters, *inspect.signature(model.forward).parameters}


def _refuse(config: GenerationConfig, options: dict[str, Any], unless_asked: Sequence[str]) -> None:
    """
    Args:
        unless_asked: settings that count only among the options.
    """
    for name, harmless in _MUST_BE.items():
        value = options.get(name, None if name in unless_asked else getattr(config, name, None))
        if value is not None and value != harmless:
            raise NotImplementedError(f"{name}={value!r} was asked for: {GENERATE_DOES}")
