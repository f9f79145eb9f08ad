"""One model class: the same prompts with the ordinary cache, a PagedCache as it is, and with paged attention."""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import hf_paged.attention
from hf_paged import PagedCache, disable_paged_attention, enable_paged_attention
from hf_paged.layer import HANDLE, PagedLayer
from hf_paged.sweep.images import other_images, with_images
from hf_paged.sweep.prompts import other_prompts, prompts
from hf_paged.sweep.tiny import build, layer_kinds

NEW = 12
TOLERANCE = 1e-3
OUTCOMES = ("kernel", "mixed", "dense", "not used", "refused", "no reference", "mismatch", "crash")
CHANGES = "changes its keys or values after storing them"
_HOUSE = Path(hf_paged.attention.__file__).parent.resolve()
_OURS = [str(folder.resolve()) for folder in (_HOUSE, _HOUSE / "kernels", _HOUSE / "patches")]


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Different(Exception):
    """Tokens or logits are other than with the ordinary cache."""


@dataclass
class Output:
    """Logits are `[steps, rows, vocab]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


def check(mapping: str, model_type: str, class_name: str) -> Line:
    """Run one class in all ways. Whatever goes wrong is told in the line."""
    line = Line(model_type, class_name, mapping, [])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            model = build(model_type, class_name, mapping)
            line.kinds = list(dict.fromkeys(layer_kinds(model.config)))
            inputs, expected = _reference(model)
            line.given = _given(inputs)
            if blind := _blindness(model, inputs, expected):
                line.reason = blind
                return line
        except Exception as error:
            line.reason = _describe(error)
            return line
        with watched() as seen:
            line.plain, line.reason = _outcome_of(lambda: compare(run(model, inputs, paged(model)), expected))
        if line.plain == "equal" and not seen.stored:
            line.outcome = line.plain = "not used"
            return line
        try:
            enable_paged_attention(model)
        except NotImplementedError as error:
            if line.plain == "equal":
                line.outcome, line.reason = "dense", _describe(error)
            else:
                line.outcome = line.plain
            return line
        plain_reason = line.reason
        with watched() as seen:
            enabled, line.reason = _outcome_of(lambda: compare(run(model, inputs, paged(model)), expected))
        disable_paged_attention(model)
        line.layers = f"{seen.through_kernel} of {seen.stored}"
        if seen.kernel and not seen.through_kernel:
            line.layers = "each in some steps"
        line.outcome = enabled if enabled != "equal" else seen.outcome()
        if line.outcome in ("dense", "mixed"):
            line.reason = "; ".join(seen.reasons) or CHANGES
        if line.plain in ("mismatch", "crash") and line.outcome not in ("mismatch", "crash"):
            line.outcome, line.reason = line.plain, f"as it is: {plain_reason}"
    return line


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


def run(model: PreTrainedModel, inputs: dict[str, Any], cache: Any) -> Output:
    """Greedy generate(); `cache` None is whatever generate() takes by itself."""
    options: dict[str, Any] = {}
    if cache is not None:
        parameters = inspect.signature(type(model).forward).parameters
        options["cache" if "cache" in parameters else "past_key_values"] = cache
    torch.manual_seed(2)  # a few models draw numbers
    out = model.generate(
        **inputs,
        **options,
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        use_cache=True,
    )
    if out.logits is None:
        raise Different("its generate() does not tell its logits")
    logits = torch.stack([step.float() for step in out.logits])
    if logits.isnan().any():
        raise Different("NaN in the logits")
    # Models of several codebooks delay each by another number of steps, so there the sequences are not of one form.
    tokens = out.sequences if len(out.sequences) == logits.shape[1] else logits.argmax(-1).T
    return Output(tokens, logits)


def compare(actual: Output, expected: Output) -> None:
    """
    Raises:
        Different: with what differs first. A row is followed up to where its two best logits are nearly tied: there any
            exact way of computing may choose either.
    """
    steps, rows, _ = expected.logits.shape
    if actual.logits.shape != expected.logits.shape:
        raise Different(f"logits of shape {list(actual.logits.shape)}, not {list(expected.logits.shape)}")
    new = expected.tokens.shape[1] - steps
    for row in range(rows):
        for step in range(steps):
            one, other = actual.logits[step, row], expected.logits[step, row]
            known = other.isfinite()
            scale = max(1.0, float(other[known].abs().max()))
            off = float((one - other)[known].abs().max()) / scale
            if not off <= TOLERANCE or (one.isfinite() != known).any():
                raise Different(f"row {row}, step {step}: logits differ by {off:.2g} of the largest")
            if actual.tokens[row, new + step] != expected.tokens[row, new + step]:
                best = other.topk(2).values
                if float(best[0] - best[1]) > 2 * TOLERANCE * scale:
                    raise Different(f"row {row}, step {step}: another token")
                break


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


def _outcome_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Different as error:
        return "mismatch", str(error)
    except (ValueError, NotImplementedError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        # transformers itself says so where a model has a cache class of its own, or takes none.
        is_theirs = "PagedCache" in str(error) or where.name == "_validate_model_kwargs"
        return ("refused" if _is_ours(where) or is_theirs else "crash"), _describe(error)
    except Exception as error:
        return "crash", _describe(error)
    return "equal", ""


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return str(Path(frame.filename).resolve().parent) in _OURS


def _describe(error: Exception) -> str:
    if isinstance(error, Different):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if _is_ours(last) else f" ({Path(last.filename).name}:{last.lineno})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{place}"


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
