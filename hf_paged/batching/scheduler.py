"""Which sequences are fed in a step, which wait, and which give up their blocks. No models here, and no tensors.

A step takes one token of every sequence that decodes and, within a budget of tokens, stretches of prompts, so that a
long prompt stalls nobody (chunked prefill; Sarathi, arXiv 2308.16369). A waiting sequence is admitted when the blocks
of its whole prompt are free. When blocks run out, the youngest sequence gives up all of its own and is computed again
later, from the tokens that it has (recomputation; vLLM, arXiv 2309.06180, section 4.5).
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from operator import attrgetter

from hf_paged.batching.requests import RequestTooLongError
from hf_paged.batching.sequences import Sequence
from hf_paged.errors import OutOfBlocksError
from hf_paged.packed import PackedStep
from hf_paged.pool import BlockPool

WATERMARK = 0.01
"""Share of the pool that admission leaves free for the sequences that run, so that they are not preempted at once."""

_order = attrgetter("order")


class Scheduler:
    """
    Args:
        pool: bound to the model's layers, and sized.
        max_step_tokens: tokens fed in a step, at most.
        max_rows: sequences that run at once, at most; no more than `max_step_tokens`.
        keeps_prompts: whether full blocks may be looked up and kept in the pool's index.

    Attributes:
        waiting, running: in order.
        key: what keys and values depend on besides the tokens, for the index of kept prompts.
        num_preemptions: so far.
        peak_running: the most that ran in a step.
    """

    def __init__(self, pool: BlockPool, max_step_tokens: int, max_rows: int, keeps_prompts: bool) -> None:
        self.pool = pool
        self.max_step_tokens, self.max_rows = max_step_tokens, max_rows
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.key: Hashable = None
        self.num_preemptions = self.peak_running = 0
        self._prefixes = pool.prefixes if keeps_prompts else None

    def check(self, max_length: int) -> None:
        """Refuse what could not be finished even alone.

        Args:
            max_length: of prompt and new tokens.

        Raises:
            RequestTooLongError: the pool is too small.
        """
        for group, allocator in enumerate(self.pool.allocators):
            needed = self._span(group, max_length - 1)  # the last token is never fed
            if needed > allocator.num_blocks:
                raise RequestTooLongError(
                    f"a request of up to {max_length:,} tokens, prompt and new ones, needs {needed:,} blocks of "
                    f"{self.pool.block_size} tokens, and the pool has {allocator.num_blocks:,} in all. Ask for fewer "
                    "with max_new_tokens=, or give a larger pool (num_blocks= or max_memory=)"
                )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        bisect.insort(self.waiting, sequence, key=_order)

    def next_step(self) -> tuple[PackedStep, list[Sequence]] | None:
        """Choose what is fed next, and find its blocks.

        Returns:
            The step and its sequences, or None if there is nothing to do.

        Raises:
            OutOfBlocksError: a single sequence runs and finds no block, since others hold them; nothing has changed.
        """
        may_admit = True
        while True:
            picked = self._pick(may_admit)
            if not picked:
                if self.waiting and not self.running:
                    if self.pool.collect_garbage():
                        continue
                    first = self.waiting[0]
                    free, total = min((a.num_free, a.num_blocks) for a in self.pool.allocators)
                    raise OutOfBlocksError(self._blocks_ahead(first, 0), free, total, self.pool.block_size)
                return None
            step = PackedStep(self.pool, [s.tables for s, _ in picked], [count for _, count in picked])
            try:
                step.allocate()
            except OutOfBlocksError:
                if len(self.running) == 1:
                    if self.pool.collect_garbage():
                        continue
                    raise
                self._preempt(self.running[-1])
                may_admit = False
                continue
            self.peak_running = max(self.peak_running, len(picked))
            return step, [sequence for sequence, _ in picked]

    def _pick(self, may_admit: bool) -> list[tuple[Sequence, int]]:
        """Sequences and how many tokens of each, those with one token first."""
        decoding = [s for s in self.running if s.num_pending == 1]
        picked, budget = [(s, 1) for s in decoding], self.max_step_tokens - len(decoding)
        for sequence in [s for s in self.running if s.num_pending > 1]:
            count = min(sequence.num_pending, budget)
            if count:
                picked.append((sequence, count))
                budget -= count
        if may_admit and self.waiting:
            for sequence in self._admit(budget):
                count = min(sequence.num_pending, budget)
                picked.append((sequence, count))
                budget -= count
        picked.sort(key=lambda pick: pick[1] != 1)
        return picked

    def _admit(self, budget: int) -> Iterable[Sequence]:
        allocators = self.pool.allocators
        with self.pool.lock:
            candidates = self.waiting[: 2 * self.max_rows]
            for sequence in candidates:
                if budget <= 0 or len(self.running) >= self.max_rows:
                    return
                if self._shares_with_running(sequence):
                    continue  # what it shares is being computed: in a step or two its blocks are there
                self._adopt(sequence)
                for group, allocator in enumerate(allocators):
                    promised = sum(self._blocks_ahead(other, group) for other in self.running)
                    spare = int(WATERMARK * allocator.num_blocks) if self.running else 0
                    if self._blocks_ahead(sequence, group) > allocator.num_free - promised - spare:
                        self._release(sequence)
                        return
                self.waiting.remove(sequence)
                bisect.insort(self.running, sequence, key=_order)
                budget -= sequence.num_pending
                yield sequence

    def _blocks_ahead(self, sequence: Sequence, group: int) -> int:
        """Blocks that a sequence will yet take to store all tokens that are known."""
        table = sequence.tables[group]
        total = -(-len(sequence.tokens) // self.pool.block_size)
        held = len(table.blocks)
        return max(min(total - table.first, self._span(group, len(sequence.tokens))) - held, 0)

    def _span(self, group: int, length: int) -> int:
        """The most blocks that a sequence holds at once until it has `length` tokens."""
        size, window = self.pool.block_size, self.pool.freed_behind(group)
        blocks = -(-length // size)
        return blocks if window is None else min(blocks, -(-(window + self.max_step_tokens) // size) + 1)

    # Prompts that are shared --------------------------------------------------------------------------------------

    def _adopt(self, sequence: Sequence) -> None:
        """Begin with what is kept of a sequence's tokens; one token at least is left to feed."""
        if self._prefixes is None:
            return
        chain = self._prefixes.match(self.key, sequence.tokens[:-1])
        if chain:
            for group, allocator in enumerate(self.pool.allocators):
                blocks = [node.tables[group].blocks[0] for node in chain]
                sequence.tables[group] = allocator.adopt(blocks, len(blocks) * self.pool.block_size)
            if not sequence.num_new:
                sequence.cached_tokens = sequence.num_stored

    def _shares_with_running(self, sequence: Sequence) -> bool:
        """Whether a prompt that is being computed begins as this one does, beyond what is kept already."""
        if self._prefixes is None:
            return False
        size, kept = self.pool.block_size, None
        for other in self.running:
            if other.num_pending <= 1:
                continue
            if kept is None:
                kept = len(self._prefixes.match(self.key, sequence.tokens[:-1])) * size
            end = min(kept + size, len(sequence.tokens) - 1, len(other.tokens))
            if end == kept + size and sequence.tokens[:end] == other.tokens[:end]:
                return True
        return False

    def keep(self, sequence: Sequence) -> None:
        """Keep a sequence's full blocks for others that begin as it does."""
        if self._prefixes is not None and sequence.num_stored >= self.pool.block_size:
            with self.pool.lock:
                self._prefixes.insert(self.key, sequence.tokens[: sequence.num_stored], sequence.tables)

    def spawn(self, parent: Sequence) -> list[Sequence]:
        """Let the other samples of a prompt, which is stored now, share its blocks and run; those for which there is no
        row wait, and are computed by themselves.

        Returns:
            Those that run.
        """
        siblings, parent.siblings = [s for s in parent.siblings if not s.ended], []
        room = max(self.max_rows - len(self.running), 0)
        with self.pool.lock:
            for sibling in siblings[:room]:
                sibling.tables = [
                    allocator.fork(table) for allocator, table in zip(self.pool.allocators, parent.tables, strict=True)
                ]
                sibling.cached_tokens = sibling.num_stored
                bisect.insort(self.running, sibling, key=_order)
        for sibling in siblings[room:]:
            self.add(sibling)
        return siblings[:room]

    # Ends ---------------------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        self.keep(sequence)  # idle blocks give way to whoever needs them; what is left need not be computed again
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Take a sequence out, and give its blocks back. Its siblings go on without it. Harmless when it is out.

        Args:
            keep: whether its full blocks may serve others that begin as it does.
        """
        sequence.ended = True
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                break
        if keep:
            self.keep(sequence)
        self._release(sequence)
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            if not sibling.ended:
                self.add(sibling)

    def _release(self, sequence: Sequence) -> None:
        with self.pool.lock:
            for allocator, table in zip(self.pool.allocators, sequence.tables, strict=True):
                allocator.release(table)
