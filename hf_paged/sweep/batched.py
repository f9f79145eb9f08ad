"""One model class in continuous batching: the prompts unpadded, each against its own generate() call."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, PreTrainedModel

from hf_paged import ContinuousBatcher
from hf_paged.sweep.compare import NEW, Output, compare, outcome_of, run
from hf_paged.sweep.prompts import rows_of_text

POOL = {"block_size": 4, "num_blocks": 8, "max_step_tokens": 4, "max_rows": 2}
"""Prompts of more than 4 tokens are fed in parts, beside rows that decode; the third waits for one of the others to
end; and two of the longest do not fit, so that one is preempted."""


class _Told(LogitsProcessor):
    """Takes down the logits of each step, and changes nothing."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores.float().clone())
        return scores


def check_batched(model: PreTrainedModel) -> tuple[str, str]:
    """`equal`, or what else came of it, and why. Images and sounds are left out: prompts are text."""
    try:
        batcher = ContinuousBatcher(model, **POOL)
    except NotImplementedError as error:
        return "refused", shorten(str(error), type(model).__name__)
    except Exception as error:
        return "crash", repr(error)
    prompts = rows_of_text(model)

    def compare_all() -> None:
        with batcher:
            told = [_Told() for _ in prompts]
            handles = [
                batcher.submit(prompt, do_sample=False, max_new_tokens=NEW, logits_processor=[one])
                for prompt, one in zip(prompts, told, strict=True)
            ]
            batcher.run()
        for prompt, handle, one in zip(prompts, handles, told, strict=True):
            alone = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}
            expected = run(model, alone, None)
            tokens = torch.tensor([[*handle.prompt_ids, *handle.result().tokens]])
            # Janus takes no processors with text, so there the tokens have to do.
            compare(Output(tokens, torch.stack(one.steps) if one.steps else expected.logits), expected)

    outcome, reason = outcome_of(compare_all)
    return ("crash" if outcome == "refused" else outcome), reason  # too late: something was served already


def shorten(text: str, name: str) -> str:
    """What a refusal says of the model, without what to do instead."""
    text = text.removeprefix(f"{name} cannot be batched continuously: ")
    for end in (". Use model.generate()", " (logits differ", "; use transformers'", ", so "):
        text = text.partition(end)[0]
    return text
