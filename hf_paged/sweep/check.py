"""One model class: its prompts with the ordinary cache, a PagedCache as it is, with paged attention, and batched."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import hf_paged.attention
from hf_paged import PagedCache, disable_paged_attention, enable_paged_attention
from hf_paged.layer import HANDLE, PagedLayer
from hf_paged.sweep.batched import check_batched
from hf_paged.sweep.compare import TOLERANCE, Output, compare, describe, outcome_of, run
from hf_paged.sweep.images import other_images, with_images
from hf_paged.sweep.prompts import other_prompts, prompts
from hf_paged.sweep.tiny import build, layer_kinds

OUTCOMES = ("kernel", "mixed", "dense", "not used", "refused", "no reference", "mismatch", "crash")
CHANGES = "changes its keys or values after storing them"


@dataclass
class Line:
    """What was found of one class."""

    type: str
    cls: str
    mapping: str
    kinds: list[str]
    given: str = ""
    """`text`, or `image` or `sound` where there is one, too."""
    outcome: str = "no reference"
    reason: str = ""
    plain: str = ""
    """`equal`, or what a PagedCache gave on the model as it is."""
    layers: str = ""
    """Layers through the kernel in every step, of those that stored something."""
    batched: str = "no reference"
    """What continuous batching made of it."""
    batched_reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(mapping: str, model_type: str, class_name: str) -> Line:
    """Run one class in all ways. Whatever goes wrong is told in the line."""
    line = Line(model_type, class_name, mapping, [])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            model = build(model_type, class_name, mapping)
        except Exception as error:
            line.reason = describe(error)
            return line
        line.kinds = list(dict.fromkeys(layer_kinds(model.config)))
        _check_cache(model, line)
        disable_paged_attention(model)
        line.batched, line.batched_reason = check_batched(model)
    return line


def _check_cache(model: PreTrainedModel, line: Line) -> None:
    """generate() with a PagedCache, on the model as it is and enabled."""
    try:
        inputs, expected = _reference(model)
        line.given = _given(inputs)
        if blind := _blindness(model, inputs, expected):
            line.reason = blind
            return
    except Exception as error:
        line.reason = describe(error)
        return
    with watched() as seen:
        line.plain, line.reason = outcome_of(lambda: compare(run(model, inputs, paged(model)), expected))
    if line.plain == "equal" and not seen.stored:
        line.outcome = line.plain = "not used"
        return
    try:
        enable_paged_attention(model)
    except NotImplementedError as error:
        if line.plain == "equal":
            line.outcome, line.reason = "dense", describe(error)
        else:
            line.outcome = line.plain
        return
    plain_reason = line.reason
    with watched() as seen:
        enabled, line.reason = outcome_of(lambda: compare(run(model, inputs, paged(model)), expected))
    line.layers = f"{seen.through_kernel} of {seen.stored}"
    if seen.kernel and not seen.through_kernel:
        line.layers = "each in some steps"
    line.outcome = enabled if enabled != "equal" else seen.outcome()
    if line.outcome in ("dense", "mixed"):
        line.reason = "; ".join(seen.reasons) or CHANGES
    if line.plain in ("mismatch", "crash") and line.outcome not in ("mismatch", "crash"):
        line.outcome, line.reason = line.plain, f"as it is: {plain_reason}"


def _reference(model: PreTrainedModel) -> tuple[dict[str, Any], Output]:
    """What the model is given, with images if it sees them so, and what it makes of that with the ordinary cache."""
    text = prompts(model)
    if "pixel_values" not in text:
        for inputs in with_images(model, text):
            with contextlib.suppress(Exception):  # the form was another
                expected, other = run(model, inputs, None), run(model, other_images(inputs), None)
                if float((other.logits[0] - expected.logits[0]).abs().max()) > 10 * TOLERANCE:
                    return inputs, expected
    return text, run(model, text, None)


def _given(inputs: dict[str, Any]) -> str:
    if {"pixel_values", "flattened_patches"} & inputs.keys():
        return "image"
    return "sound" if {"input_features", "input_values"} & inputs.keys() else "text"


def paged(model: PreTrainedModel) -> Any:
    """A PagedCache as the README says it is made for this model."""
    cache = PagedCache(model.config, num_blocks=256)
    has_two = model.config.is_encoder_decoder or model.config.model_type == "blip"  # which attends to the image
    return EncoderDecoderCache(cache, DynamicCache()) if has_two else cache


def _blindness(model: PreTrainedModel, inputs: dict[str, Any], expected: Output) -> str:
    """What makes a comparison of this model worth nothing: logits of the last step that hang on no earlier token."""
    other = run(model, other_prompts(inputs), None)
    if other.logits.shape != expected.logits.shape:
        return "the number of steps hangs on the prompt"
    first, second = other.logits[:2], expected.logits[:2]
    known = first.isfinite() & second.isfinite()
    if float((first - second)[known].abs().max()) < 10 * TOLERANCE:
        return "its logits hang on no earlier token"
    return ""


class Seen:
    """Which layers stored tokens, and which way their attention went."""

    def __init__(self) -> None:
        self.updates: Counter[int] = Counter()
        self.kernel: Counter[int] = Counter()
        self.dense: Counter[int] = Counter()
        self.reasons: dict[str, None] = {}

    @property
    def stored(self) -> int:
        return len(self.updates)

    @property
    def through_kernel(self) -> int:
        return sum(self.kernel[layer] > 0 and not self.dense[layer] for layer in self.updates)

    def outcome(self) -> str:
        if self.stored and self.through_kernel == self.stored:
            return "kernel"
        return "mixed" if self.kernel else "dense"


def _why_dense(
    layer: PagedLayer, handle: Any, module: Any, query: Any, key: Any, value: Any, *args: Any, **asked: Any
) -> str:
    if getattr(value, HANDLE, None) is not handle:
        return CHANGES
    if asked.get("position_bias") is not None:
        return "adds a bias to the scores"
    if query.shape[2] != handle.step.q_len:
        return "asks with fewer queries than there are new tokens"
    if layer.kind == "chunked_attention":
        return "chunked attention"
    return "a mask that says more than causal order, window and padding"


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Within, every layer's attention is counted by the way that it goes."""
    seen, attend, update = Seen(), hf_paged.attention._attend, PagedLayer.update
    dense = hf_paged.attention.dense_attention
    current: list[int] = []
    went_dense: list[bool] = []

    def watch_attend(layer: PagedLayer, *args: Any, **kwargs: Any) -> Any:
        current.append(layer.index)
        before = len(went_dense)
        try:
            result = attend(layer, *args, **kwargs)
        finally:
            current.pop()
        if len(went_dense) == before:
            seen.kernel[layer.index] += 1
        else:
            seen.dense[layer.index] += 1
            seen.reasons.setdefault(_why_dense(layer, *args, **kwargs))
        return result

    def watch_dense(*args: Any, **kwargs: Any) -> Any:
        if current:
            went_dense.append(True)
        return dense(*args, **kwargs)

    def watch_update(layer: PagedLayer, *args: Any, **kwargs: Any) -> Any:
        seen.updates[layer.index] += 1
        return update(layer, *args, **kwargs)

    hf_paged.attention._attend, hf_paged.attention.dense_attention = watch_attend, watch_dense
    PagedLayer.update = watch_update
    try:
        yield seen
    finally:
        hf_paged.attention._attend, hf_paged.attention.dense_attention = attend, dense
        PagedLayer.update = update
