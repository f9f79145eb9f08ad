"""Running a model, holding what comes out against what should, and naming what went wrong."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_paged.attention

NEW = 12
TOLERANCE = 1e-3
_HOUSE = Path(hf_paged.attention.__file__).parent.resolve()
_OURS = [str(folder.resolve()) for folder in (_HOUSE, _HOUSE / "kernels", _HOUSE / "patches")]


class Different(Exception):
    """Tokens or logits are other than with the ordinary cache."""


@dataclass
class Output:
    """Logits are `[steps, rows, vocab]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


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


def outcome_of(call: Callable[[], None]) -> tuple[str, str]:
    """`equal`, `mismatch`, `refused` or `crash`, and why."""
    try:
        call()
    except Different as error:
        return "mismatch", str(error)
    except (ValueError, NotImplementedError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        # transformers itself says so where a model has a cache class of its own, or takes none.
        is_theirs = "PagedCache" in str(error) or where.name == "_validate_model_kwargs"
        return ("refused" if _is_ours(where) or is_theirs else "crash"), describe(error)
    except Exception as error:
        return "crash", describe(error)
    return "equal", ""


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return str(Path(frame.filename).resolve().parent) in _OURS


def describe(error: Exception) -> str:
    """An error in one line, and where it was raised if that was not here."""
    if isinstance(error, Different):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if _is_ours(last) else f" ({Path(last.filename).name}:{last.lineno})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{place}"
