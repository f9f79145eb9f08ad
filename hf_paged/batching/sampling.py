"""Choosing the next token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch

from hf_paged.batching.sequences import Sequence


def draw(sequences: List[Sequence], logits: torch.Tensor) -> dict[Sequence, Exception]:
    """Choose a token for each sequence, and note it in its `drawn`. One that has been drawn stays.

    Each sequence is treated as generate() treats a row that is alone: its scores in float32, its own processors, and
    its own random numbers.

    Args:
        logits: `[sequences, vocabulary]`

    Returns:
        The sequences whose processors or criteria failed, and how.
    """
    failed: dict[Sequence, Exception] = {}
    greedy: list[int] = []
    together: dict[tuple, list[int]] = {}
    alone: list[int] = []
    for row, sequence in enumerate(sequences):
        rules = sequence.rules
        if sequence.drawn is not None:
            continue
        if not rules.do_sample and not rules.processors:
            greedy.append(row)
        elif rules.together is not None:
            together.setdefault(rules.together, []).append(row)
        else:
            alone.append(row)

    if greedy:
        chosen = logits[greedy] if len(greedy) != len(logits) else logits
        for row, token in zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True):
            _take(sequences[row], token, logits[row : row + 1], failed)
    for rows in together.values():
        members = [sequences[row] for row in rows]
        scores = members[0].rules.processors(None, logits[rows].float())
        probabilities, drawn = scores.softmax(dim=-1), {}
        for position, sequence in enumerate(members):
            try:
                drawn[position] = _sample(sequence, probabilities[position : position + 1])
            except Exception as error:  # as of probabilities that are NaN
                failed[sequence] = error
        tokens = torch.cat(list(drawn.values())).tolist() if drawn else []  # read from the device at once
        for position, token in zip(drawn, tokens, strict=True):
            _take(members[position], token, scores[position : position + 1], failed)
    for row in alone:
        sequence = sequences[row]
        try:
            scores = logits[row : row + 1].to(copy=True, dtype=torch.float32)
            scores = sequence.rules.processors(sequence.ids(logits.device), scores)
            do_sample = sequence.rules.do_sample
            chosen = _sample(sequence, scores.softmax(dim=-1)) if do_sample else scores.argmax(dim=-1)
        except Exception as error:
            failed[sequence] = error
        else:
            _take(sequence, int(chosen), scores, failed)
    return failed


def _sample(sequence: Sequence, probabilities: torch.Tensor) -> torch.Tensor:
    """`[1]`: a token drawn by `[1, vocabulary]` probabilities, with the sequence's own generator."""
    return torch.multinomial(probabilities, 1, generator=sequence.generator)[0]


def _take(sequence: Sequence, token: int, scores: torch.Tensor, failed: dict[Sequence, Exception]) -> None:
    """Note a token, and whether it ends the sequence."""
    rules, reason = sequence.rules, None
    if token in rules.eos_tokens:
        reason = "eos"
    elif rules.criteria:
        try:
            if bool(rules.criteria(sequence.ids(scores.device, token), scores).all()):
                reason = "stopped"
        except Exception as error:
            failed[sequence] = error
            return
    if reason is None and len(sequence.tokens) + 1 >= rules.max_length:
        reason = "length"
    sequence.drawn = token, reason
