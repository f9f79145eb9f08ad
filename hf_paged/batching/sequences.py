"""One sequence on its way through the batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from hf_paged.allocator import BlockTable

if TYPE_CHECKING:
    from hf_paged.batching.handle import RequestHandle
    from hf_paged.batching.rules import Rules


class Sequence:
    """A prompt and the tokens that follow. What is stored of it is in its block tables; the rest is yet to be fed.

    Args:
        prompt_ids: at least one.
        rules: how the next token is chosen, and when it is enough.
        order: what comes first goes first.
        num_groups: of layers, each with a block table.

    Attributes:
        tokens: prompt and new tokens.
        siblings: other samples of the same prompt that begin once it is stored.
        drawn: a token that was chosen, and why it ends the sequence if it does, before it is taken up.
        ended: it takes no more part.
    """

    def __init__(self, prompt_ids: list[int], rules: Rules, order: tuple, num_groups: int) -> None:
        self.tokens = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.rules, self.order = rules, order
        self.tables = [BlockTable() for _ in range(num_groups)]
        self.siblings: list[Sequence] = []
        self.drawn: tuple[int, str | None] | None = None
        self.ended = False
        self.generator: torch.Generator | None = None
        self.handle: RequestHandle | None = None
        self.cached_tokens = self.preemptions = 0
        self.born, self.first_token_at = time.perf_counter(), None
        self._ids: torch.Tensor | None = None
        self._num_ids = 0

    @property
    def num_stored(self) -> int:
        """Tokens in the blocks."""
        return self.tables[0].length

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not yet fed. The next one can be chosen once there are none."""
        return len(self.tokens) - self.num_stored

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    def ids(self, device: torch.device, extra: int | None = None) -> torch.Tensor:
        """`[1, length]`: the tokens, and `extra` after them, for logits processors and criteria."""
        if self._ids is None:
            self._ids = torch.empty((1, self.rules.max_length), dtype=torch.long, device=device)
        length = len(self.tokens)
        if self._num_ids < length:
            self._ids[0, self._num_ids : length] = torch.tensor(self.tokens[self._num_ids :], dtype=torch.long)
            self._num_ids = length
        if extra is None:
            return self._ids[:, :length]
        self._ids[0, length] = extra
        return self._ids[:, : length + 1]

    def forget_ids(self) -> None:
        """Let the tensor of `ids` go."""
        self._ids, self._num_ids = None, 0
