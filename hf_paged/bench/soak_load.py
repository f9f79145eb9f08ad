"""The load of a soak: requests of every kind at random times, those that must fail among them, and who reads them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged.batching.batcher import BatcherStats, ContinuousBatcher
from hf_paged.batching.handle import RequestHandle
from hf_paged.batching.requests import QueueFullError, RequestTooLongError

MAX_PROMPT, MAX_NEW_TOKENS = 160, 48
READERS = 6
"""Threads that wait for requests or read their tokens."""
BUSY, LULL = 1.5, 12.0
"""Steps from one request to the next on average, in turn: more requests than a batch of ten can do, and fewer."""


class PlannedFault(Exception):
    """Raised by what a request brings, as was planned."""


class _Fails:
    """Raises at the n-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise PlannedFault


class FailingProcessor(_Fails, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count()
        return scores


class FailingCriterion(_Fails, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Listener(_Fails):
    """A streamer that takes its time, and may fail at the n-th token."""

    def __init__(self, delay: float, at: int = 0) -> None:
        super().__init__(at)
        self.delay, self.ended = delay, False
        self.tokens: list[int] = []
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        time.sleep(self.delay)
        self.count()
        self.tokens += value.tolist()

    def end(self) -> None:
        self.ended = True


@dataclass
class Plan:
    """A request, and what should become of it.

    Attributes:
        options: of `submit`.
        greedy: the options of a generate() call that gives the same tokens, if it is greedy and plain.
        fails_at: tokens at which what it brings fails; 0 for never.
        reader: `none`, `result`, `slow` or `quits`: who waits for it, and how.
        too_long: the pool cannot hold it.
    """

    prompt: list[int]
    options: dict[str, Any]
    greedy: dict[str, Any] | None = None
    fails_at: int = 0
    reader: str = "none"
    too_long: bool = False
    listener: Listener | None = None


@dataclass
class Planner:
    """Draws requests by chance; the same ones for the same dice.

    Args:
        vocabulary: ids go from 10 up to it.
        longest: tokens of prompt and answer, at most.
        pool_tokens: that the pool holds.
    """

    dice: random.Random
    vocabulary: int
    longest: int
    pool_tokens: int
    shared: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        beginnings = random.Random(1)  # the same for all threads
        third = self.longest // 3
        self.shared = [[beginnings.randrange(10, self.vocabulary) for _ in range(n)] for n in (third // 2, third)]

    def draw(self) -> Plan:
        dice = self.dice
        new_tokens = dice.randint(1, min(MAX_NEW_TOKENS, self.longest // 3))
        prompt = self._prompt(min(MAX_PROMPT, self.longest - new_tokens))
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "priority": dice.choice((0, 0, 0, 1, 2))}
        plan = Plan(prompt, options, reader=dice.choices(("none", "result", "slow", "quits"), (50, 25, 10, 5))[0])
        kind = dice.choices(
            ("greedy", "penalty", "sampled", "samples", "processor", "criterion", "streamer", "too long"),
            (42, 6, 16, 10, 6, 6, 8, 2),
        )[0]
        at = dice.randint(1, new_tokens)
        if kind in ("greedy", "penalty", "processor", "criterion", "streamer"):
            options["do_sample"] = False
        if kind == "greedy":
            plan.greedy = {"max_new_tokens": new_tokens}
            if dice.random() < 0.25:
                plan.listener = options["streamer"] = Listener(dice.choice((0.0, 0.005, 0.03)))
        elif kind == "penalty":
            options["repetition_penalty"] = 1.2
            plan.greedy = {"max_new_tokens": new_tokens, "repetition_penalty": 1.2}
        elif kind in ("sampled", "samples"):
            options |= {"do_sample": True, "temperature": 0.8, "seed": dice.randrange(1 << 30)}
            options["top_k"] = dice.choice((20, 50))
            if kind == "samples":
                options["num_return_sequences"] = dice.randint(2, 3)
        elif kind == "processor":
            plan.fails_at, options["logits_processor"] = at, [FailingProcessor(at)]
        elif kind == "criterion":
            plan.fails_at, options["stopping_criteria"] = at, [FailingCriterion(at)]
        elif kind == "streamer":
            plan.fails_at, plan.listener = at, Listener(dice.choice((0.0, 0.01)), at)
            options["streamer"] = plan.listener
        else:
            plan.too_long, options["max_new_tokens"] = True, self.pool_tokens + 1
        return plan

    def _prompt(self, longest: int) -> list[int]:
        dice = self.dice
        beginning = dice.choice(self.shared) if dice.random() < 0.4 else []
        length = max(1, min(int(dice.lognormvariate(3.5, 0.9)), longest - len(beginning)))
        return (beginning + [dice.randrange(10, self.vocabulary) for _ in range(length)])[:longest]


@dataclass(eq=False)
class Made:
    """A request that was taken.

    Attributes:
        reading: of whoever reads it, if anybody does; gives the tokens that were read, or None.
    """

    plan: Plan
    handle: RequestHandle
    reading: Future[list[int] | None] | None = None

    @property
    def is_over(self) -> bool:
        return all(sample.done for sample in self.handle.samples) and (self.reading is None or self.reading.done())


class Load:
    """Submits requests from several threads until it is stopped.

    Args:
        since: from where on it is counted how long a step takes; some have been run since.
        period: seconds of busy times and lulls together.

    Attributes:
        made: requests that were taken, in the order in which they were; whoever takes them out has `lock`.
        refused: requests that could not be taken, by reason.
        errors: what was raised that should not have been.
    """

    def __init__(
        self,
        batcher: ContinuousBatcher,
        make_planner: Callable[[random.Random], Planner],
        *,
        seed: int,
        threads: int,
        since: BatcherStats,
        period: float,
    ) -> None:
        self.batcher, self.lock = batcher, threading.Lock()
        self.made: list[Made] = []
        self.refused: dict[str, int] = {"queue full": 0, "too long": 0}
        self.errors: list[BaseException] = []
        self._since, self._period, self._num_threads = since, period, threads
        self._stop = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="soak reader")
        dice = [random.Random(f"{seed} {number}") for number in range(threads)]
        self._threads = [
            threading.Thread(target=self._submit_all, args=(make_planner, own), name="soak", daemon=True)
            for own in dice
        ]

    def start(self) -> None:
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let no more requests come. Those that wait for room are made yet, if somebody runs the steps."""
        self._stop.set()

    @property
    def is_submitting(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Let the readers go, once every request has ended."""
        self._readers.shutdown(wait=False)

    def _submit_all(self, make_planner: Callable[[random.Random], Planner], dice: random.Random) -> None:
        planner, last = make_planner(dice), None
        while not self._stop.wait(self._pause(dice)):
            if last is not None and dice.random() < 0.06:
                last.cancel()
            try:
                last = self._submit(planner.draw(), dice) or last
            except RuntimeError as error:
                if not self._stop.is_set():
                    self.errors.append(error)
                return
            except BaseException as error:
                self.errors.append(error)
                return

    def _pause(self, dice: random.Random) -> float:
        """Seconds to the next request of this thread; exponential, so that arrivals are as by chance."""
        is_busy = (time.monotonic() - self._began) % self._period < 0.75 * self._period
        now, before = self.batcher.stats(), self._since
        step = (now.seconds - before.seconds) / (now.steps - before.steps)
        return dice.expovariate(1 / (step * (BUSY if is_busy else LULL) * self._num_threads))

    def _submit(self, plan: Plan, dice: random.Random) -> RequestHandle | None:
        try:
            handle = self.batcher.submit(plan.prompt, block=dice.random() < 0.9, **plan.options)
        except QueueFullError:
            self._refuse("queue full")
            return None
        except RequestTooLongError:
            if not plan.too_long:
                raise
            self._refuse("too long")
            return None
        made = Made(plan, handle)
        if plan.reader != "none":
            made.reading = self._readers.submit(self._read, plan.reader, handle, dice.randint(1, 8))
        if dice.random() < 0.05:
            handle.cancel()
        with self.lock:
            self.made.append(made)
        return handle

    def _refuse(self, reason: str) -> None:
        with self.lock:
            self.refused[reason] += 1

    def _read(self, how: str, handle: RequestHandle, patience: int) -> list[int] | None:
        try:
            if how == "result":
                return handle.result().tokens
            tokens = []
            for token in handle if how == "slow" else itertools.islice(handle, patience):
                tokens.append(token)
                time.sleep(0.01)
            if how == "quits":
                handle.cancel()
                return None
            return tokens
        except PlannedFault:
            return None
        except BaseException as error:
            self.errors.append(error)
            return None
