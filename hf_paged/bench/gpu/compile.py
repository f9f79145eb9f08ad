"""Compiles what the chosen sections launch, several kernels at a time, so that none of them waits for it later."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_paged.bench.gpu.cases import Case, Rows, correctness_cases
from hf_paged.bench.gpu.correctness import check_chunks, other_cases
from hf_paged.bench.gpu.decode import decode_m
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.layers import Layers
from hf_paged.bench.gpu.recorder import describe_error
from hf_paged.bench.gpu.sizes import Shape

if TYPE_CHECKING:
    from hf_paged.kernels.triton_config import Config


def measure_compile(bench: Bench, sections: Sequence[str]) -> None:
    """Launch every kernel that the sections need once, in threads: most of a compilation runs outside of Python."""

    def run_all() -> dict[str, Any]:
        tasks = compile_tasks(bench, sections)
        refusals: dict[str, None] = {}
        pool = concurrent.futures.ThreadPoolExecutor(bench.sizes.compile_threads)
        try:
            for done in [pool.submit(task) for task in tasks]:
                try:
                    done.result()
                except Exception as error:
                    refusals[describe_error(error)[:120]] = None
        finally:
            pool.shutdown(cancel_futures=True)
        bench.synchronize()
        return {"launches": len(tasks), "refusals": "; ".join(refusals) or None}

    result = bench.recorder.measure("compile", "warm-up in threads", run_all, cap=150.0)
    if "seconds" not in result.values:
        result.values["seconds"] = result.seconds
        bench.recorder.write()


def compile_tasks(bench: Bench, sections: Sequence[str]) -> list[Callable[[], object]]:
    sizes = bench.sizes
    tasks: list[Callable[[], object]] = []
    if not bench.on_gpu:  # nothing is compiled
        return [partial(attend_once, bench, correctness_cases(sizes)[0])]
    if "correctness" in sections:
        tasks += [partial(attend_once, bench, case) for case in correctness_cases(sizes)]
        tasks += [
            partial(check, bench, case)
            for _, check, case in other_cases(sizes)
            if check is not check_chunks  # the chunk is one for all threads
        ]
    if {"decode", "sweep", "blocks"} & set(sections):
        block_sizes = sizes.block_sizes if "blocks" in sections else (16,)
        tasks += [
            partial(decode_once, bench, sizes.layer, size, splits)
            for size, splits in itertools.product(block_sizes, (1, 2))
        ]
    if "sweep" in sections:
        from hf_paged.kernels.triton_config import Config

        configs = [Config(decode_m(bench), *cut) for cut in sizes.sweep_cuts]
        tasks += [
            partial(decode_once, bench, sizes.layer, 16, splits, config)
            for config, splits in itertools.product(configs, (1, 2))
        ]
    if "prefill" in sections:
        tasks.append(partial(prefill_once, bench, sizes.layer))
    if "generate" in sections:
        model = sizes.model
        shape = Shape(model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"], sizes.model_dtype)
        tasks += [partial(decode_once, bench, shape, 16, splits) for splits in (1, 2)]
        tasks.append(partial(prefill_once, bench, shape))
    return tasks


def attend_once(bench: Bench, case: Case) -> Tensor:
    return Rows(bench, case).fill().attend()


def decode_once(bench: Bench, shape: Shape, block_size: int, splits: int, config: Config | None = None) -> Tensor:
    layers = Layers(bench, shape, 1, 512, block_size)
    return bench.kernels.decode(
        layers.query, layers.storages[0], layers.plan, scale=shape.scale, config=config, splits=splits
    )


def prefill_once(bench: Bench, shape: Shape) -> Tensor:
    layers = Layers(bench, shape, 1, 512, q_len=512)
    new = layers.query[:, : shape.kv_heads]
    bench.kernels.write(layers.storages[0], new, new, layers.plan)
    return bench.kernels.prefill(layers.query, new, new, layers.storages[0], layers.plan, scale=shape.scale)
