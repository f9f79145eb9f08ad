"""What whoever made a request holds of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.batching.requests import FinishReason, GenerationResult

if TYPE_CHECKING:
    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.batching.sequences import Sequence


class RequestHandle:
    """One request that a `ContinuousBatcher` has taken, or one sample of it.

    Whoever waits for it runs the batch, if no other thread does: `result()`, and iterating over the tokens. The tokens
    are in a list that ends with the request, so a slow reader holds nobody up and makes nothing grow.

    Attributes:
        index: of the request, in the order in which they were made.
        sample: of the request's `num_return_sequences`.
        prompt_ids: token ids.
        samples: the handles of all samples of the request.
    """

    def __init__(self, batcher: ContinuousBatcher, sequence: Sequence, index: int, sample: int, streamer: Any) -> None:
        self._batcher, self._sequence = batcher, sequence
        self.index, self.sample = index, sample
        self.prompt_ids = sequence.tokens[: sequence.num_prompt]
        self.samples: list[RequestHandle] = [self]
        self._tokens: list[int] = []
        self._reason: FinishReason | None = None
        self._error: BaseException | None = None
        self._ended_at: float | None = None
        self._result: GenerationResult | None = None
        self._streamer = streamer
        self._streamed = streamer is None

    def __repr__(self) -> str:
        state = self._reason or f"{len(self._tokens)} tokens so far"
        return f"RequestHandle(index={self.index}, sample={self.sample}, {state})"

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return list(self._tokens)

    @property
    def num_tokens(self) -> int:
        """How many new tokens there are so far."""
        return len(self._tokens)

    @property
    def done(self) -> bool:
        """Whether it has ended and its streamer, if any, has been given everything."""
        return self._reason is not None and self._streamed

    def cancel(self) -> None:
        """End the request, all samples of it. Its blocks are free at once, or after the step that is running. Harmless
        when it has ended."""
        self._batcher.cancel(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end, and run the batch meanwhile if no other thread does.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it has not ended; it goes on.
            Exception: what ended it, if something failed.
        """
        self._batcher.wait(lambda: self.done, timeout)
        result = self.outcome()
        if result.error is not None:
            raise result.error
        return result

    def outcome(self) -> GenerationResult:
        """The result of a request that has ended, also where that is an error. A streamer that is still being given
        tokens may fail yet; `result` waits for it."""
        if self._result is not None:
            return self._result
        is_final = self.done
        if self._reason is None:
            raise RuntimeError("the request has not ended; wait for it with result()")
        sequence = self._sequence
        result = GenerationResult(
            index=self.index,
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            tokens=list(self._tokens),
            text=self._batcher.decode(self._tokens),
            finish_reason=self._reason,
            error=self._error,
            cached_tokens=sequence.cached_tokens,
            preemptions=sequence.preemptions,
            seconds=self._ended_at - sequence.born,
            seconds_to_first_token=None if sequence.first_token_at is None else sequence.first_token_at - sequence.born,
        )
        if is_final:
            self._result = result
        return result

    def __iter__(self) -> Iterator[int]:
        """The new tokens, as they come. Raises what ended the request, if something failed."""
        position = 0
        while True:
            self._batcher.wait(partial(self._has_news, position))
            while position < len(self._tokens):
                yield self._tokens[position]
                position += 1
            if self._reason is not None and position == len(self._tokens):
                if self._error is not None:
                    raise self._error
                return

    def _has_news(self, position: int) -> bool:
        return len(self._tokens) > position or self._reason is not None

    # What the batcher calls ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._streamer is not None:
            threading.Thread(target=self._stream, name=f"hf_paged streamer {self.index}", daemon=True).start()

    def _take(self, token: int) -> None:
        self._tokens.append(token)

    def _end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        if self._reason is None:
            self._error, self._ended_at = error, time.perf_counter()
            self._reason = reason

    def _stream(self) -> None:
        """Feed the streamer, in a thread of its own, so that a slow one stops nobody."""
        batcher, position = self._batcher, 0
        try:
            self._streamer.put(torch.tensor([self.prompt_ids]))
            while True:
                batcher.wait_for_news(partial(self._has_news, position))
                while position < len(self._tokens):
                    self._streamer.put(torch.tensor(self._tokens[position : position + 1]))
                    position += 1
                if self._reason is not None and position == len(self._tokens):
                    break
            self._streamer.end()
        except Exception as error:
            batcher.fail(self, error)
            batcher.wait_for_news(lambda: self._reason is not None)
            self._error = error  # it may have ended by itself meanwhile, or before
            self._reason = "error"
        finally:
            self._streamed = True
            batcher.announce()
