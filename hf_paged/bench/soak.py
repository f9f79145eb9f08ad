"""A soak: a batch under a random load for minutes, and a look at what it leaves behind.

Requests come by chance from several threads, more than can be done for most of the time, into a pool that is smaller
than they are. They are cancelled, they fail, they share beginnings, their readers are slow. In the end every one must
have ended as it should, and every block, every thread and all memory must be back; some greedy ones are compared with
generate() alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from hf_paged.batching.batcher import BatcherStats, ContinuousBatcher
from hf_paged.batching.requests import GenerationResult
from hf_paged.batching.runner import position_limit
from hf_paged.bench.harness import Machine, describe_machine
from hf_paged.bench.soak_load import MAX_NEW_TOKENS, MAX_PROMPT, Load, Made, PlannedFault, Planner
from hf_paged.models import display_name
from hf_paged.pool import BlockPool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_REQUESTS = 4
"""How many of the longest requests fit into the pool, unless it is told."""
MAX_WAITING = 8
THREADS_END_WITHIN = 10.0
TIE = {torch.float32: 1e-4, torch.float64: 1e-8}
TIE_OTHERWISE = 0.03
"""Two scores that are closer, relative to the spread of all, may change places when sums are rounded differently."""


@dataclass(frozen=True)
class SoakOptions:
    """
    Attributes:
        minutes: of load; to end what has begun and to compare takes some seconds more.
        threads: that submit.
        num_blocks: of the pool; None for four of the longest requests.
        checks: requests that are compared with generate() alone, at most.
        patience: seconds without any progress after which what has not ended counts as starved.
        memory_growth: bytes by which the process may grow in the second half. In the first minutes it does grow, less
            and less: measured with SmolLM2, from 1,102 to 1,229 MiB in 80 s, and to 1,250 in 60 more.
    """

    minutes: float = 2.0
    seed: int = 0
    threads: int = 4
    block_size: int = 16
    num_blocks: int | None = None
    checks: int = 16
    patience: float = 30.0
    memory_growth: int = 128 << 20


@dataclass
class SoakResult:
    """What a soak has found.

    Attributes:
        outcomes: samples by how they ended, and requests that were refused.
        seconds: from the first request to the end of the last.
        latency: percentiles in seconds, of requests that ended by themselves.
        checked, ties: requests that were compared, and those of them whose tokens differ from where two scores are as
            good as equal.
        memory_growth: bytes, in the second half.
        problems: what should not be, in words. None: the soak has passed.
    """

    model: str
    dtype: str
    device: str
    options: SoakOptions
    machine: Machine
    stats: BatcherStats
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    new_tokens: int = 0
    latency: dict[str, dict[str, float]] = field(default_factory=dict)
    checked: int = 0
    ties: int = 0
    memory_growth: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "passed": self.passed,
            "tokens_per_second": self.tokens_per_second,
            "stats": self.stats.as_dict(),
            "machine": self.machine.as_dict(),
        }


def run_soak(
    model: PreTrainedModel, options: SoakOptions | None = None, *, progress: Callable[[str], object] | None = None
) -> SoakResult:
    """Run a soak; the model is as before at the end.

    Raises:
        NotImplementedError: the model cannot be batched.
        ValueError: the pool is too small for any request.
    """
    options, say = options or SoakOptions(), progress or (lambda text: None)
    positions, limit = getattr(model.config.get_text_config(), "max_position_embeddings", None), position_limit(model)
    longest = min(MAX_PROMPT + MAX_NEW_TOKENS, positions or 2**31, limit[0] if limit else 2**31)
    blocks_each = -(-longest // options.block_size)
    num_blocks = options.num_blocks or LONGEST_REQUESTS * blocks_each
    if num_blocks < blocks_each:
        raise ValueError(f"{num_blocks} blocks are fewer than the {blocks_each} of a single request")
    pool = BlockPool(block_size=options.block_size, num_blocks=num_blocks, prefix_cache=_may_keep(model))
    batcher = ContinuousBatcher(model, pool=pool, max_waiting=MAX_WAITING)
    vocabulary = min(model.config.get_text_config().vocab_size, model.get_input_embeddings().weight.shape[0])
    make_planner = partial(Planner, vocabulary=vocabulary, longest=longest, pool_tokens=num_blocks * options.block_size)
    with batcher:
        say("warming up")
        planner = make_planner(random.Random(options.seed))
        _warm_up(batcher, planner, 1)  # what is slow the first time is no measure
        cold = batcher.stats()
        _warm_up(batcher, planner, MAX_WAITING)
        soak, before = _Soak(batcher, options, say), batcher.stats()
        threads_before = set(threading.enumerate())
        load = Load(
            batcher,
            make_planner,
            seed=options.seed,
            threads=options.threads,
            since=cold,
            period=max(options.minutes * 60 / 5, 1.0),
        )
        soak.run(load)
        stats = batcher.stats()
    load.end()
    soak.look_at_what_is_left(threads_before)
    result = SoakResult(
        model=display_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        options=options,
        machine=describe_machine(),
        stats=stats,
        outcomes=dict(soak.outcomes.most_common()) | {f"refused ({why})": n for why, n in load.refused.items() if n},
        seconds=soak.seconds,
        new_tokens=stats.new_tokens - before.new_tokens,
        latency={name: _percentiles(values) for name, values in soak.latency.items() if values},
        memory_growth=soak.memory_growth,
        problems=soak.problems,
    )
    _compare(model, soak.to_compare(), result, say)
    return result


class _Soak:
    """One run: drives the batch in this thread, and notes what becomes of each request."""

    def __init__(self, batcher: ContinuousBatcher, options: SoakOptions, say: Callable[[str], object]) -> None:
        self.batcher, self.options, self.say = batcher, options, say
        self.outcomes: Counter[str] = Counter()
        self.latency: dict[str, list[float]] = {"first token": [], "whole request": [], "each further token": []}
        self.problems: list[str] = []
        self.seconds, self.memory_growth = 0.0, 0
        self._dice = random.Random(f"{options.seed} checks")
        self._kept: dict[bool, list[tuple[dict[str, Any], GenerationResult]]] = {True: [], False: []}
        self._seen: Counter[bool] = Counter()
        self._memory = 0  # in the middle
        self._said = self._looked = 0.0

    def run(self, load: Load) -> None:
        """The load, and the end of all that it has made."""
        self._load, self._began = load, time.monotonic()
        self._until = self._began + 60 * self.options.minutes
        try:
            load.start()
            self.batcher.wait(self._is_over)
            load.stop()
            self._drain()
        except Exception as error:
            self._problem(f"a step died of {type(error).__name__}: {error}")
        finally:
            load.stop()
        self.seconds = time.monotonic() - self._began
        self.memory_growth = _memory_in_use() - (self._memory or _memory_in_use())
        if self.memory_growth > self.options.memory_growth:
            self._problem(f"memory grew by {self.memory_growth / 2**20:.0f} MiB in the second half")

    def _is_over(self) -> bool:
        """Called between any two steps."""
        now = time.monotonic()
        if now - self._looked > 0.2:
            self._looked = now
            self._harvest()
            if not self._memory and now > (self._began + self._until) / 2:
                self._memory = _memory_in_use()
        if now - self._said > 1:
            self._said = now
            done, left = sum(self.outcomes.values()), max(self._until - now, 0)
            self.say(f"{left:.0f} s to go, {done} done, {self.batcher.stats().running} running")
        return now >= self._until or bool(self._load.errors)

    def _drain(self) -> None:
        """Let everything end, as long as there is progress."""
        self._until = 0.0
        before, since = None, time.monotonic()

        def is_over() -> bool:
            nonlocal before, since
            self._is_over()
            stats = self.batcher.stats()
            with self._load.lock:
                listeners = [made.plan.listener for made in self._load.made if made.plan.listener is not None]
                nothing_left = not self._load.made
            heard = sum(len(listener.tokens) for listener in listeners)
            now = (stats.new_tokens, stats.prompt_tokens, sum(self.outcomes.values()), heard)
            if now != before:
                before, since = now, time.monotonic()
            is_done = nothing_left and self.batcher.is_idle and not self._load.is_submitting
            return is_done or time.monotonic() - since > self.options.patience

        self.batcher.wait(is_over)

    def _harvest(self) -> None:
        """Note what has ended, and let it go."""
        with self._load.lock:
            over = [made for made in self._load.made if made.is_over]
            self._load.made = [made for made in self._load.made if made not in over]
        for made in over:
            for sample in made.handle.samples:
                self._note(made, sample.outcome())

    def _note(self, made: Made, result: GenerationResult) -> None:
        plan, count = made.plan, len(result.tokens)
        reason: str = result.finish_reason
        if reason == "error":
            if plan.fails_at and isinstance(result.error, PlannedFault):
                reason = "failed as planned"
            else:
                self._problem(f"request {result.index} failed with {type(result.error).__name__}: {result.error}")
        elif plan.fails_at and reason != "cancelled" and count - (reason == "eos") >= plan.fails_at:
            self._problem(f"request {result.index} ended well, and should have failed at token {plan.fails_at}")
        self.outcomes[reason] += 1
        if reason == "length" and count != plan.options["max_new_tokens"]:
            self._problem(f"request {result.index} has {count} tokens of {plan.options['max_new_tokens']}")
        if result.sample == 0:
            self._compare_with_readers(made, result)
        first = result.seconds_to_first_token
        if reason in ("eos", "length", "stopped") and first is not None:
            self.latency["first token"].append(first)
            self.latency["whole request"].append(result.seconds)
            if count > 1:
                self.latency["each further token"].append((result.seconds - first) / (count - 1))
        if plan.greedy is not None and reason != "error" and count:
            self._keep(plan.greedy, result)

    def _compare_with_readers(self, made: Made, result: GenerationResult) -> None:
        read = None if made.reading is None else made.reading.result()
        listener = made.plan.listener
        if read is not None and read != result.tokens:
            self._problem(f"request {result.index}: {len(read)} tokens were read, of {len(result.tokens)}")
        if listener is not None and not made.plan.fails_at and (listener.tokens != result.tokens or not listener.ended):
            self._problem(f"request {result.index}: {len(listener.tokens)} tokens streamed, of {len(result.tokens)}")

    def _keep(self, options: dict[str, Any], result: GenerationResult) -> None:
        """Keep some for comparison, all with the same chance: half of them of those that were computed twice or found
        something in blocks."""
        kind = bool(result.preemptions or result.cached_tokens)
        self._seen[kind] += 1
        if len(self._kept[kind]) < self.options.checks:
            self._kept[kind].append((options, result))
        elif (place := self._dice.randrange(self._seen[kind])) < self.options.checks:
            self._kept[kind][place] = options, result

    def to_compare(self) -> list[tuple[dict[str, Any], GenerationResult]]:
        first = self._kept[True][: max(self.options.checks // 2, self.options.checks - len(self._kept[False]))]
        return first + self._kept[False][: self.options.checks - len(first)]

    def look_at_what_is_left(self, threads_before: set[threading.Thread]) -> None:
        """After the batcher was closed."""
        for error in self._load.errors:
            self._problem(f"a thread died of {type(error).__name__}: {error}")
        if starved := len(self._load.made):
            self._problem(f"{starved} requests have not ended, the first of them {self._load.made[0].handle!r}")
        pool = self.batcher.pool
        for group, allocator in enumerate(pool.allocators):
            if allocator.num_used:
                self._problem(f"{allocator.num_used} of {allocator.num_blocks} blocks are not free")
            try:
                allocator.check([] if pool.prefixes is None else pool.prefixes.tables[group])
            except AssertionError as error:
                self._problem(f"the books are wrong: {error}")
        until = time.monotonic() + THREADS_END_WITHIN
        left = [thread for thread in threading.enumerate() if thread not in threads_before]
        for thread in left:
            thread.join(max(until - time.monotonic(), 0))
        if names := [thread.name for thread in left if thread.is_alive()]:
            self._problem(f"{len(names)} threads are left: {', '.join(names[:4])}")

    def _problem(self, text: str) -> None:
        self.problems.append(text)


def _may_keep(model: PreTrainedModel) -> bool:
    from hf_paged.layer_kinds import group_layers, layer_kinds

    return all(group.kind == "full_attention" for group in group_layers(*layer_kinds(model.config)))


def _warm_up(batcher: ContinuousBatcher, planner: Planner, count: int) -> None:
    """Run so many requests of those to come, without what fails."""
    for _ in range(count):
        plan = planner.draw()
        batcher.submit(plan.prompt, max_new_tokens=min(plan.options["max_new_tokens"], MAX_NEW_TOKENS), do_sample=False)
    batcher.run()


def _memory_in_use() -> int:
    """Bytes of the process, once what Python and malloc keep for later has been given back where they can."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc has it; every thread that runs steps has an arena there
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": max(values)}


def _compare(
    model: PreTrainedModel,
    kept: list[tuple[dict[str, Any], GenerationResult]],
    result: SoakResult,
    say: Callable[[str], object],
) -> None:
    """Compare requests with generate() of their prompt alone."""
    for number, (options, of_batch) in enumerate(kept):
        say(f"comparing with generate() alone, {number + 1} of {len(kept)}")
        output = _generate(model, of_batch.prompt_ids, options)[0].tolist()
        expected, actual = output[len(of_batch.prompt_ids) :], of_batch.tokens
        if of_batch.finish_reason == "cancelled":
            expected = expected[: len(actual)]
        result.checked += 1
        if actual == expected:
            continue
        same = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), None)
        if same is not None and _is_tie(model, of_batch.prompt_ids + expected[:same], actual[same], options):
            result.ties += 1
            continue
        where = f"in length, {len(actual)} for {len(expected)}" if same is None else f"from new token {same} on"
        result.problems.append(
            f"request {of_batch.index} ({len(of_batch.prompt_ids)} tokens, {of_batch.preemptions} preemptions, "
            f"{of_batch.cached_tokens} found in blocks) differs from generate() {where}"
        )


def _generate(model: PreTrainedModel, tokens: list[int], options: dict[str, Any]) -> Any:
    ids = torch.tensor([tokens], device=model.device)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
    )


def _is_tie(model: PreTrainedModel, tokens: list[int], other: int, options: dict[str, Any]) -> bool:
    """Whether another token is about as likely as the likeliest after these."""
    options = options | {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    scores = _generate(model, tokens, options).scores[0][0].double()
    seen = scores[scores.isfinite()]
    limit = TIE.get(model.dtype, TIE_OTHERWISE) * float(seen.max() - seen.min())
    return float(seen.max() - scores[other]) <= limit
