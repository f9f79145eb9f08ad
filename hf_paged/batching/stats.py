"""Figures of a batch: what is counted as it runs, and what users are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hf_paged.batching.requests import FinishReason

if TYPE_CHECKING:
    from hf_paged.batching.scheduler import Scheduler
    from hf_paged.batching.sequences import Sequence


@dataclass(frozen=True)
class BatcherStats:
    """One look at a batch."""

    waiting: int
    running: int
    peak_running: int
    """The most sequences that ran at once."""
    finished: int
    """Requests that ended by themselves; a sample counts as one."""
    failed: int
    cancelled: int
    preemptions: int
    steps: int
    prompt_tokens: int
    """Tokens of prompts that were fed, those that were computed again included."""
    cached_tokens: int
    """Tokens of prompts that were found in blocks."""
    new_tokens: int
    used_blocks: int
    free_blocks: int
    total_blocks: int
    peak_blocks: int
    seconds: float
    """Spent in steps."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second spent in steps."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """The same as a dict, for JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


@dataclass
class BatchCounts:
    """What a batcher counts as it runs; the names are those of `BatcherStats`."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    def note_fed(self, sequences: Iterable[Sequence], starts: Iterable[int]) -> None:
        """Count the tokens of prompts in a step; `starts` tells how much of each sequence was stored before it."""
        for sequence, start in zip(sequences, starts, strict=True):
            if start < sequence.num_prompt:
                self.prompt_tokens += min(sequence.num_stored, sequence.num_prompt) - start

    def note_end(self, reason: FinishReason) -> None:
        """Count a request, or a sample of one, that has ended."""
        if reason == "error":
            self.failed += 1
        elif reason == "cancelled":
            self.cancelled += 1
        else:
            self.finished += 1

    def look(self, scheduler: Scheduler, num_waiting: int) -> BatcherStats:
        """These counts, and the scheduler and its pool as they are now. The caller has the pool's lock."""
        allocators = scheduler.pool.allocators
        return BatcherStats(
            **vars(self),
            waiting=num_waiting,
            running=len(scheduler.running),
            peak_running=scheduler.peak_running,
            preemptions=scheduler.num_preemptions,
            used_blocks=sum(allocator.num_used for allocator in allocators),
            free_blocks=sum(allocator.num_free for allocator in allocators),
            total_blocks=sum(allocator.num_blocks for allocator in allocators),
            peak_blocks=sum(allocator.peak_used for allocator in allocators),
        )
