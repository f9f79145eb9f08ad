"""The loop: feed a step to the model, choose tokens, end what has ended."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_paged.batching.enabler import Enabler
from hf_paged.batching.handle import RequestHandle
from hf_paged.batching.requests import FinishReason, QueueFullError
from hf_paged.batching.rules import read_rules
from hf_paged.batching.runner import PackedRunner, check_packing, position_limit
from hf_paged.batching.sampling import draw
from hf_paged.batching.scheduler import Scheduler
from hf_paged.batching.sequences import Sequence
from hf_paged.batching.stats import BatchCounts, BatcherStats
from hf_paged.errors import OutOfBlocksError
from hf_paged.layer_kinds import group_layers, layer_kinds
from hf_paged.packed import PackedStep
from hf_paged.patches.enable import find_model
from hf_paged.patches.prompts import model_key
from hf_paged.pool import BlockPool

AGING = 64
"""Steps by which a priority of 1 puts a request ahead of those that came with 0."""
STEP_TOKENS = {"cpu": 512}
"""Tokens fed in a step, by type of device."""
STEP_TOKENS_OTHERWISE = 2048


class ContinuousBatcher:
    """Generates for many requests at once, each admitted as soon as there are blocks for it.

    Requests may be made and cancelled from any thread, at any time. There is no thread of its own: whoever calls
    `run()`, or waits for a request, runs the steps, one thread at a time. The model's weights and adapters must stay as
    they are while requests run.

    ```python
    with ContinuousBatcher(model, tokenizer=tokenizer) as batcher:
        first = batcher.submit("Once upon a time", max_new_tokens=40)
        second = batcher.submit("The capital of France", max_new_tokens=40, do_sample=True, seed=1)
        print(first.result().text)
    ```

    Args:
        model: a transformers model; it is enabled for paged attention while the batcher is open.
        tokenizer: for prompts and results as text, and for stop strings.
        block_size, num_blocks, max_memory: of a pool of its own; see `BlockPool`. `num_blocks` and `max_memory` exclude
            each other.
        prefix_cache: keep full blocks of prompts and answers, so that requests which begin alike compute that once. By
            default where the model has no sliding windows: kept prompts keep the blocks that have left one, too.
        pool: a pool to share. Excludes the four above.
        max_step_tokens: tokens fed in a step, at most; longer prompts are fed in parts. By default 512 on a CPU, else
            2,048.
        max_rows: sequences that run at once, at most.
        max_waiting: requests that may wait; `submit` then waits itself. None for no limit.

    Raises:
        NotImplementedError: the model cannot be fed packed sequences, for a reason that is given; it is found out by
            comparing packed steps with the model's own.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_memory: int | float | str | None = None,
        prefix_cache: bool | None = None,
        pool: BlockPool | None = None,
        max_step_tokens: int | None = None,
        max_rows: int = 256,
        max_waiting: int | None = None,
    ) -> None:
        self._model = core = find_model(model)
        if prompt_learning := getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise NotImplementedError(f"a PEFT model that learns prompts ({prompt_learning=}) cannot be batched")
        for name, value in (("max_step_tokens", max_step_tokens), ("max_rows", max_rows)):
            if value is None and name == "max_step_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, or None for no limit, not {max_waiting!r}")
        if pool is None and prefix_cache is None:
            prefix_cache = all(group.kind == "full_attention" for group in group_layers(*layer_kinds(core.config)))
        pool = BlockPool.given_or_new(
            pool, block_size=block_size, num_blocks=num_blocks, max_memory=max_memory, prefix_cache=prefix_cache
        )
        self.pool, self.tokenizer, self._max_waiting = pool, tokenizer, max_waiting
        self._closing = self._closed = self._stepping = False
        self._lock = threading.Condition()  # guards what other threads touch, and tells them of news
        self._driver = threading.RLock()  # whoever has it runs the steps
        self._inbox: deque[Sequence] = deque()
        self._early: deque[tuple[RequestHandle, FinishReason, BaseException | None]] = deque()
        self._live: set[Sequence] = set()
        self._num_requests = 0
        self._counts = BatchCounts()
        self._enabler = Enabler(core)
        weakref.finalize(self, self._enabler.close).atexit = False  # of a batcher that nobody closes
        try:
            self._runner = PackedRunner(core, pool, tokenizer)
            check_packing(core, tokenizer)
            if not pool.is_sized:
                self._runner.size_pool()
            self._limit = position_limit(core)
            if max_step_tokens is None:
                max_step_tokens = STEP_TOKENS.get(self._runner.device.type, STEP_TOKENS_OTHERWISE)
            # With frequencies that depend on the length, keys do not follow from the tokens alone.
            keeps_prompts = self._limit is None or "rotary frequencies of all" not in self._limit[1]
            self._scheduler = Scheduler(pool, max_step_tokens, min(max_rows, max_step_tokens), keeps_prompts)
        except BaseException:
            self._enabler.close()
            raise

    # Requests -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        *,
        priority: int = 0,
        seed: int | None = None,
        streamer: Any = None,
        block: bool = True,
        timeout: float | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Make a request; from any thread.

        Args:
            prompt: token ids (a list, or a tensor of one row); where there is a tokenizer also a text, or a chat (a
                list of messages), which is put through the tokenizer's template.
            priority: a request goes before those that came later, and before those of a lower priority that came up to
                64 steps earlier for each level; so none waits for ever.
            seed: of this request's random numbers; a sample adds its number. With it the tokens are those of
                `torch.manual_seed(seed)` and generate() with this prompt alone, whatever else is in the batch. By
                default drawn from torch's.
            streamer: as for generate(); fed in a thread of its own.
            block, timeout: whether to wait, and how many seconds, where `max_waiting` requests wait.
            options: as for generate(): `generation_config`, any of its settings, `logits_processor`,
                `stopping_criteria`, `prefix_allowed_tokens_fn`. Processors and criteria are called with this request's
                row alone.

        Returns:
            A handle; with `num_return_sequences` that of the first sample, which has all in `samples`.

        Raises:
            NotImplementedError: an option that a batch cannot honour, by name (beams, assisted decoding, ...).
            ValueError: an option that generate() itself refuses, or an empty prompt.
            TypeError: a prompt of another kind, or a priority or seed that is no integer.
            RequestTooLongError: the pool could not hold it even alone.
            QueueFullError: `max_waiting` requests wait still.
            RuntimeError: the batcher is closed.
        """
        for name, value in (("priority", priority), ("seed", 0 if seed is None else seed)):
            if not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, not {value!r}")
        ids = self._encode(prompt)
        if self.tokenizer is not None:
            options.setdefault("tokenizer", self.tokenizer)
        rules = read_rules(self._model, ids, options)
        self._check_length(rules.max_length)
        if streamer is not None and rules.num_samples > 1:
            raise ValueError("a streamer takes one sequence; leave out num_return_sequences")
        if rules.do_sample and seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        # Some processors keep a state; one that the caller has made is shared by the samples all the same.
        alone = options | {"num_return_sequences": 1}
        all_rules = [rules, *(read_rules(self._model, ids, alone) for _ in range(1, rules.num_samples))]
        with self._room(block, timeout):
            self._check_open()
            index, self._num_requests = self._num_requests, self._num_requests + 1
            sequences = []
            for sample, rules in enumerate(all_rules):
                order = (self._counts.steps - priority * AGING, index, sample)
                sequence = Sequence(ids, rules, order, len(self.pool.groups))
                if rules.do_sample:
                    sequence.generator = torch.Generator(device=self._runner.device).manual_seed(seed + sample)
                sequence.handle = RequestHandle(self, sequence, index, sample, streamer)
                sequences.append(sequence)
            first = sequences[0]
            first.siblings = sequences[1:]
            for sequence in sequences:
                sequence.handle.samples = [s.handle for s in sequences]
            self._inbox.append(first)
            first.handle._start()
            self._lock.notify_all()
        return first.handle

    def reject(self, prompt: Any, error: Exception) -> RequestHandle:
        """A handle of a request that was refused, for whoever wants one for each."""
        with self._lock:
            index, self._num_requests = self._num_requests, self._num_requests + 1
            self._counts.note_end("error")
        sequence = Sequence(self._encode(prompt), None, (), 0)
        sequence.handle = RequestHandle(self, sequence, index, 0, None)
        sequence.handle._end("error", error)
        return sequence.handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a request; see `RequestHandle.cancel`."""
        self._end_early(handle.samples, "cancelled", None)

    def fail(self, handle: RequestHandle, error: BaseException) -> None:
        """End a request with an error."""
        self._end_early([handle], "error", error)

    def _end_early(self, handles: list[RequestHandle], reason: FinishReason, error: BaseException | None) -> None:
        self._early.extend((handle, reason, error) for handle in handles)
        self._see_to_ends()

    def _see_to_ends(self) -> None:
        """Do what `_end_early` was asked, unless another thread runs steps: it comes here when it has stopped."""
        while self._early and self._driver.acquire(blocking=False):
            try:
                if self._stepping:  # this very thread, from within a processor: it is done when the step has ended
                    return
                self._take_in()
            finally:
                self._driver.release()

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping):
            raise TypeError("a prompt is token ids, a text or a chat, not what a tokenizer returns: pass its input_ids")
        is_chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
        if isinstance(prompt, str) or is_chat:
            if self.tokenizer is None:
                raise ValueError("a prompt is a text, but there is no tokenizer: pass tokenizer=, or token ids")
            if is_chat:
                prompt = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            else:
                prompt = self.tokenizer(prompt)["input_ids"]
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.squeeze(0) if prompt.ndim == 2 and len(prompt) == 1 else prompt
            if prompt.ndim != 1 or prompt.dtype.is_floating_point:
                raise ValueError(f"a prompt is one row of token ids, not {prompt.dtype} of shape {tuple(prompt.shape)}")
            prompt = prompt.tolist()
        ids = list(prompt) if isinstance(prompt, Iterable) else [None]
        if not all(isinstance(token, Integral) for token in ids):
            raise TypeError(
                f"a prompt is a list of token ids, a tensor of one row, a text or a chat, not {prompt!r:.60}; a "
                "list of several prompts goes to generate_many"
            )
        ids = [int(token) for token in ids]
        if not ids:
            raise ValueError("a prompt is empty; give it one token at least, such as the tokenizer's bos_token_id")
        size = self._model.get_input_embeddings().weight.shape[0]
        if not all(0 <= token < size for token in ids):
            raise ValueError(f"a prompt has token ids that the model does not know: they go from 0 to {size - 1}")
        return ids

    def _check_length(self, max_length: int) -> None:
        self._scheduler.check(max_length)
        if self._limit is not None and max_length > self._limit[0]:
            raise NotImplementedError(
                f"the request may grow to {max_length:,} tokens, and beyond {self._limit[0]:,} {self._limit[1]}. Ask "
                "for fewer with max_new_tokens=, or use model.generate()"
            )

    @contextmanager
    def _room(self, block: bool, timeout: float | None) -> Iterator[None]:
        """Within, the queue has room for one more request, and no other thread makes one."""

        def has_room() -> bool:
            return self._max_waiting is None or self._num_waiting < self._max_waiting

        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._closing or has_room():
                    yield
                    return
            try:
                if not block:
                    raise TimeoutError
                self.wait(lambda: self._closing or has_room(), deadline and max(deadline - time.monotonic(), 0))
            except TimeoutError:
                raise QueueFullError(
                    f"as many requests are waiting as max_waiting={self._max_waiting} allows; run the batch, or wait "
                    "with block=True"
                ) from None

    @property
    def _num_waiting(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting)

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("this batcher is closed; make a new one")

    def decode(self, tokens: list[int]) -> str | None:
        """Text of new tokens, or None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    # Running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing is left to do, in this thread."""
        self.wait(lambda: self.is_idle)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._lock:  # a request is in the inbox or live until its handle says that it has ended
            return not (self._inbox or self._early or self._live)

    def wait(self, is_done: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until `is_done`, and run steps meanwhile if no other thread does.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"not done after {timeout} seconds; it goes on")
            stepped = False
            if not self._closing and self._driver.acquire(blocking=False):
                try:
                    stepped = self.step()
                finally:
                    self._driver.release()
                    self._see_to_ends()
            if not stepped:
                with self._lock:
                    if not is_done():
                        self._lock.wait(0.05)

    def wait_for_news(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done` without running steps."""
        with self._lock:
            while not is_done():
                self._lock.wait()

    def announce(self) -> None:
        """Tell those who wait that something has changed."""
        with self._lock:
            self._lock.notify_all()

    def step(self) -> bool:
        """Run one step.

        Returns:
            Whether there was anything to do.
        """
        with self._driver:
            if self._stepping:
                raise RuntimeError("a step is running: what it calls cannot run another one, or wait for a request")
            self._stepping = True
            try:
                self._take_in()
                return self._step()
            finally:
                self._stepping = False
                self.announce()
                self._see_to_ends()

    def _step(self) -> bool:
        scheduler, began = self._scheduler, time.perf_counter()
        if not scheduler.running and scheduler.waiting and self.pool.prefixes is not None:
            scheduler.key = model_key(self._model)  # weights do not change while requests run
        try:
            scheduled = scheduler.next_step()
        except OutOfBlocksError as error:
            self._end((scheduler.running or scheduler.waiting)[0], "error", error)
            return True
        if scheduled is None:
            return False
        step, sequences = scheduled
        recordings = self.pool.recordings
        try:
            for recording in recordings:
                recording.note_batch_step(self, step, sequences)
            ready = [row for row, sequence in enumerate(sequences) if sequence.num_pending == 0]
            ids = [
                token
                for sequence, start, count in zip(sequences, step.starts, step.counts, strict=True)
                for token in sequence.tokens[start : start + count]
            ]
            logits = self._runner.forward(step, ids, step.last_tokens[ready])
            drawing, rows = [], []
            for position, row in enumerate(ready):
                family = [sequences[row], *(s for s in sequences[row].siblings if not s.ended)]
                drawing += family
                rows += [position] * len(family)
            failed = draw(drawing, logits if len(rows) == len(ready) else logits[rows])
        except BaseException:
            step.undo()
            for recording in recordings:
                recording.note_undone(self, step)
            raise
        self._commit(step, sequences, drawing, failed)
        self._counts.seconds += time.perf_counter() - began
        return True

    def _commit(
        self,
        step: PackedStep,
        sequences: list[Sequence],
        drawing: list[Sequence],
        failed: dict[Sequence, Exception],
    ) -> None:
        """Take up what a step has brought."""
        scheduler, counts, now = self._scheduler, self._counts, time.perf_counter()
        counts.steps += 1
        counts.note_fed(sequences, step.starts)
        for sequence in sequences:
            if sequence.num_pending == 0 and sequence.num_new == 0:
                counts.cached_tokens += sequence.cached_tokens
                scheduler.keep(sequence)
                for sibling in scheduler.spawn(sequence):
                    counts.cached_tokens += sibling.cached_tokens
        for sequence in drawing:
            if (error := failed.get(sequence)) is not None:
                self._end(sequence, "error", error)
                continue
            (token, reason), sequence.drawn = sequence.drawn, None
            sequence.tokens.append(token)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            counts.new_tokens += 1
            sequence.handle._take(token)
            if reason is not None:
                self._end(sequence, reason)

    def _take_in(self) -> None:
        """Take up what other threads have asked for."""
        early = [self._early.popleft() for _ in range(len(self._early))]  # first: their requests were made before
        with self._lock:
            while self._inbox:
                sequence = self._inbox.popleft()
                for each in (sequence, *sequence.siblings):
                    each.rules.start_clock()
                self._live.update([sequence, *sequence.siblings])
                self._scheduler.add(sequence)
        for handle, reason, error in early:
            if handle._sequence in self._live:
                self._end(handle._sequence, reason, error)
        self.announce()

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        # What an error or an interrupt has left is not handed on.
        self._scheduler.remove(sequence, keep=reason in ("eos", "length", "stopped"))
        sequence.forget_ids()
        with self._lock:
            self._counts.note_end(reason)
            sequence.handle._end(reason, error)
            self._live.discard(sequence)
        for recording in self.pool.recordings:
            recording.note_request_end(self, sequence, reason)

    # The end ------------------------------------------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """Requests, tokens and blocks as they are now."""
        with self.pool.lock:
            return self._counts.look(self._scheduler, self._num_waiting)

    def close(self) -> None:
        """Cancel what has not ended, give every block back, and leave the model as it was before. Harmless twice."""
        self._closing = True  # nobody who waits begins another step, or this might wait for long
        with self._driver:
            if self._stepping:
                self._closing = False
                raise RuntimeError("a step is running: what it calls cannot close the batcher")
            if self._closed:
                return
            self._closing = self._closed = True
            self._take_in()
            for sequence in list(self._live):
                self._end(sequence, "cancelled")
            self._enabler.close()
            self.announce()

    # What recordings and pictures look at ---------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks or are about to, in order."""
        return list(self._scheduler.running)

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait, in order; with them the samples that begin once their prompt is stored."""
        with self._lock:
            waiting = [*self._scheduler.waiting, *self._inbox]
        samples = [sample for first in (*self._scheduler.running, *waiting) for sample in first.siblings]
        return waiting + [sample for sample in samples if not sample.ended]

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._scheduler.running)} running, {self._num_waiting} waiting"
        return f"ContinuousBatcher({state}, {self.pool!r})"

    def _repr_html_(self) -> str:
        from hf_paged.pictures.html import html_of_batcher

        return html_of_batcher(self)

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
