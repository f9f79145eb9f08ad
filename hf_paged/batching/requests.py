"""What is asked of a batch, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

FinishReason = Literal["eos", "length", "stopped", "cancelled", "error"]


class Request:
    """A prompt with arguments of its own, for `generate_many`.

    Args:
        prompt: token ids, or a text where a tokenizer was given.
        arguments: as for `ContinuousBatcher.submit`; they come before those given for all prompts.
    """

    def __init__(self, prompt: str | Sequence[int] | torch.Tensor, **arguments: Any) -> None:
        self.prompt, self.arguments = prompt, arguments

    def __repr__(self) -> str:
        return f"Request({', '.join([repr(self.prompt), *(f'{k}={v!r}' for k, v in self.arguments.items())])})"


@dataclass(frozen=True)
class GenerationResult:
    """What became of one request, or of one sample of it."""

    index: int
    """Of the request, in the order in which they were made."""
    sample: int
    """Of the request's `num_return_sequences`."""
    prompt_ids: list[int]
    tokens: list[int]
    """New tokens, the one that ended the sequence included."""
    text: str | None
    """The new tokens decoded, special ones left out; None without a tokenizer."""
    finish_reason: FinishReason
    """`eos`: an end-of-sequence token; `length`: as many tokens as were asked for; `stopped`: another criterion, such
    as a stop string or a time limit; `cancelled`; `error`."""
    error: BaseException | None
    """What ended it, if `finish_reason` is `error`."""
    cached_tokens: int
    """Tokens of the prompt that were found in blocks, and not computed."""
    preemptions: int
    """How often it gave its blocks up for an older request, and was computed again later."""
    seconds: float
    """From request to end."""
    seconds_to_first_token: float | None

    @property
    def sequence(self) -> list[int]:
        """Prompt and new tokens, as generate() returns them."""
        return self.prompt_ids + self.tokens

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict, for JSON; an error as its text."""
        return asdict(self) | {"error": None if self.error is None else repr(self.error)}


class RequestTooLongError(ValueError):
    """A request needs more blocks than the pool has in all."""


class QueueFullError(RuntimeError):
    """So many requests are waiting as there may be."""


class BatchError(RuntimeError):
    """Some requests of a batch failed; the others are done.

    Attributes:
        results: of all requests, in order; those that failed have an `error`.
    """

    def __init__(self, results: list[GenerationResult]) -> None:
        self.results = results
        failed = [result for result in results if result.error is not None]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(results)} requests failed, the first of them number {first.index} with "
            f"{type(first.error).__name__}: {str(first.error).rstrip('.')}. The others are in .results of this error; "
            "with raise_errors=False they are returned, and what failed has .error"
        )
