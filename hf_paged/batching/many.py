"""generate() for many prompts at once."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.batching.handle import RequestHandle
from hf_paged.batching.requests import BatchError, GenerationResult, Request, RequestTooLongError

PROGRESS_AFTER = 3.0
"""Seconds after which a progress bar is shown, where one can be."""

_OF_BATCHER = (
    *("tokenizer", "block_size", "num_blocks", "max_memory", "prefix_cache", "pool"),
    *("max_step_tokens", "max_rows", "max_waiting"),
)


@dataclass(frozen=True)
class NewToken:
    """A token as it comes."""

    index: int
    """Of the prompt."""
    sample: int
    token: int


def generate_many(
    model: torch.nn.Module,
    prompts: Iterable[Any],
    generation_config: Any = None,
    *,
    seed: int | None = None,
    raise_errors: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> list[GenerationResult]:
    """Generate for many prompts, each admitted as soon as there are blocks for it; none is padded to another.

    Greedy tokens are those of `model.generate()` with each prompt alone.

    Args:
        model: a transformers model, enabled for paged attention or not.
        prompts: token ids (lists, or tensors of one row), where there is a `tokenizer` texts and chats, or `Request`s
            with arguments of their own.
        generation_config: for all prompts.
        seed: of the random numbers; prompt `i` has `seed + i`.
        raise_errors: whether to raise when requests have failed, once the others are done.
        progress: whether to show a progress bar; by default on a terminal or in a notebook, when it takes a while.
        options: any setting of a GenerationConfig, and what `ContinuousBatcher` and its `submit` take.

    Returns:
        A result for each prompt, in order; with `num_return_sequences` one for each sample, those of a prompt together.

    Raises:
        BatchError: requests have failed (one that is too long for the pool is such); it has the results of the others.
        NotImplementedError, ValueError: an option, a prompt or a model that cannot be served; see
            `ContinuousBatcher`. Nothing has been generated.
    """
    batcher, handles = _submit_all(model, prompts, generation_config, seed, options)
    samples = [sample for handle in handles for sample in handle.samples]
    with batcher, _bar(len(samples), progress) as bar:
        ended = 0

        def are_done() -> bool:
            nonlocal ended
            now = sum(sample.done for sample in samples)
            bar.update(now - ended)
            ended = now
            return now == len(samples)

        batcher.wait(are_done)
        results = [_light(sample.outcome()) for sample in samples]
    if raise_errors and any(result.error is not None for result in results):
        raise BatchError(results)
    return results


def iterate_many(
    model: torch.nn.Module,
    prompts: Iterable[Any],
    generation_config: Any = None,
    *,
    tokens: bool = False,
    seed: int | None = None,
    **options: Any,
) -> Iterator[GenerationResult | NewToken]:
    """`generate_many` as an iterator, which runs the batch while it is read.

    Args:
        tokens: whether to yield every token as it comes, too.
        model, prompts, generation_config, seed, options: as for `generate_many`.

    Yields:
        Each result as it is done, with an `error` if it failed, and before it, if asked for, its tokens.

    Raises:
        NotImplementedError, ValueError: as for `generate_many`, at the call.
    """
    batcher, handles = _submit_all(model, prompts, generation_config, seed, options)
    events = _iterate(batcher, [sample for handle in handles for sample in handle.samples], tokens)
    next(events)  # from here on it closes the batcher, whatever becomes of it
    return events


def _iterate(batcher: ContinuousBatcher, open_ones: list[RequestHandle], tokens: bool) -> Iterator[Any]:
    given = dict.fromkeys(open_ones, 0)
    with batcher:
        yield None
        while given:
            batcher.wait(lambda: any(h.done or (tokens and h.num_tokens > n) for h, n in given.items()))
            for handle in list(given):
                is_done = handle.done
                if tokens:
                    for token in handle.tokens[given[handle] :]:
                        given[handle] += 1
                        yield NewToken(handle.index, handle.sample, token)
                if is_done:
                    del given[handle]
                    yield _light(handle.outcome())


def _submit_all(
    model: torch.nn.Module,
    prompts: Iterable[Any],
    generation_config: Any,
    seed: int | None,
    options: dict[str, Any],
) -> tuple[ContinuousBatcher, list[RequestHandle]]:
    check_prompts(prompts)
    batcher = ContinuousBatcher(model, **{name: options.pop(name) for name in _OF_BATCHER if name in options})
    if generation_config is not None:
        options["generation_config"] = generation_config
    try:
        handles = []
        for index, prompt in enumerate(prompts):
            own = dict(options)
            if seed is not None:
                own["seed"] = seed + index
            if isinstance(prompt, Request):
                own |= prompt.arguments
                prompt = prompt.prompt
            try:
                handles.append(batcher.submit(prompt, **own))
            except RequestTooLongError as error:  # the others can go on
                handles.append(batcher.reject(prompt, error))
    except BaseException:
        batcher.close()
        raise
    return batcher, handles


def check_prompts(prompts: Any) -> None:
    """Raises TypeError where a single prompt, or a padded batch, was given for a list of prompts."""
    if isinstance(prompts, str | Mapping) or (isinstance(prompts, torch.Tensor) and prompts.ndim > 1):
        raise TypeError(
            f"prompts is a list of prompts, not a {type(prompts).__name__}: pass texts, or unpadded lists of token ids "
            "(a tokenizer's input_ids, made without padding and return_tensors)"
        )


def _light(result: GenerationResult) -> GenerationResult:
    """A result whose error tells its traceback as a note. The frames themselves would hold on to the pool."""
    error = result.error
    if error is not None and error.__traceback__ is not None:
        error.add_note("".join(traceback.format_exception(error)))
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return result


def _bar(total: int, progress: bool | None) -> tqdm:
    delay = PROGRESS_AFTER if progress is None else 0
    disable = None if progress is None else not progress  # None: where stderr is no terminal
    return tqdm(total=total, desc="generating", unit="prompt", delay=delay, disable=disable)
