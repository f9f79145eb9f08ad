"""generate_many over several processes, each with a model of its own (data parallel), as `accelerate launch` runs them.

Accelerate splits the prompts and gathers the results; see "Distributed inference" in its documentation. What is added
is that nothing which happens in one process lets the others wait.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_paged.batching.many import check_prompts, generate_many
from hf_paged.batching.requests import BatchError, GenerationResult


class ProcessError(RuntimeError):
    """`generate_across` failed in another process.

    Attributes:
        process: its number.
    """

    def __init__(self, process: int, error: str) -> None:
        self.process = process
        super().__init__(f"generating failed in process {process} with {error}")


@dataclass
class _Share:
    """What a process hands to all others."""

    process: int
    num_prompts: int
    """That it was given, its own share and the others'."""
    results: list[GenerationResult]
    error: str | None = None


def generate_across(
    model: torch.nn.Module,
    prompts: Iterable[Any],
    generation_config: Any = None,
    *,
    seed: int | None = None,
    raise_errors: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> list[GenerationResult]:
    """`generate_many` over all processes of `accelerate launch` (or torchrun); with one process it is the same.

    Every process calls it with the same arguments and a model of its own. Each generates for a stretch of the prompts
    that follow each other, so that those which begin alike, side by side, stay together. It waits for the slowest, as
    long as the process group allows: for hours, begin with
    `Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=...))])`.

    Args:
        model, generation_config, raise_errors, options: as for `generate_many`.
        prompts: all of them, in every process.
        seed: of the random numbers; prompt `i` has `seed + i`, however many processes there are.
        progress: whether the main process shows a bar, of its own share.

    Returns:
        The results of all prompts in order, in every process. An error that cannot be sent comes as a `RuntimeError`
        with its text.

    Raises:
        BatchError: requests have failed, in any process; it has the results of all. In every process.
        ProcessError: another process failed as a whole. The one that did raises what it failed with.
    """
    check_prompts(prompts)
    state, prompts = PartialState(), list(prompts)
    if state.num_processes < int(os.environ.get("WORLD_SIZE", 1)):
        warnings.warn(
            "there are several processes, but accelerate knows of one, so that each generates for all prompts; on CPUs "
            "begin with Accelerator(cpu=True)",
            stacklevel=2,
        )
    share, failure = _Share(state.process_index, len(prompts), []), None
    try:
        with state.split_between_processes(list(range(len(prompts)))) as numbers:
            share.results = _generate(
                model,
                [prompts[number] for number in numbers],
                generation_config,
                first=numbers[0] if numbers else 0,
                seed=seed,
                progress=progress if state.is_main_process else False,
                **options,
            )
    except Exception as error:  # the others wait for this process
        failure, share.error = error, f"{type(error).__name__}: {error}"
    shares: list[_Share] = gather_object([share])
    if failure is not None:
        raise failure
    for other in shares:
        if other.error is not None:
            raise ProcessError(other.process, other.error)
        if other.num_prompts != len(prompts):
            raise ValueError(
                f"process {other.process} was given {other.num_prompts} prompts and process {state.process_index} "
                f"{len(prompts)}: give all prompts to every process"
            )
    results = [result for other in shares for result in other.results]
    if raise_errors and any(result.error is not None for result in results):
        raise BatchError(results)
    return results


def _generate(
    model: torch.nn.Module, prompts: Any, generation_config: Any, *, first: int, seed: int | None, **options: Any
) -> list[GenerationResult]:
    """The share of a process, whose first prompt is number `first` of all."""
    own_seed = None if seed is None else seed + first
    results = generate_many(model, prompts, generation_config, seed=own_seed, raise_errors=False, **options)
    return [
        replace(result, index=result.index + first, error=_as_sent(result.error)) if result.error or first else result
        for result in results
    ]


def _as_sent(error: BaseException | None) -> BaseException | None:
    """The error if it can be pickled and read again, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
