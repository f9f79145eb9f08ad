"""Decode at each point beside its peers, and under other cuts than the rule's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.layers import Layers
from hf_paged.bench.gpu.peers import sdpa_decode, varlen_decode
from hf_paged.bench.gpu.results import Result, Target

if TYPE_CHECKING:
    from hf_paged.kernels.triton_config import Config


def measure_decode(bench: Bench) -> None:
    recorder = bench.recorder

    def paged(batch: int, length: int) -> Result:
        values = decode_in_graph(bench, batch, length, without=True)
        return Result("", "", values, target=decode_target(bench, batch, length, values))

    for point in bench.sizes.points:
        label = f"{point[0]} x {point[1]:,}"
        recorder.measure("decode", f"{label} paged", partial(paged, *point))
        recorder.measure("decode", f"{label} sdpa", partial(sdpa_decode, bench, *point), peer=True)
        recorder.measure("decode", f"{label} varlen_attn", partial(varlen_decode, bench, *point), peer=True)
    recorder.measure("decode", "host cost of a call", lambda: host_cost(bench))


def measure_sweep(bench: Bench) -> None:
    from hf_paged.kernels.triton_config import Config

    m = decode_m(bench)
    for point in bench.sizes.sweep:
        label = f"{point[0]} x {point[1]:,}"
        for tile, warps, stages in bench.sizes.sweep_cuts:
            name = f"{label} tile {tile}, {warps} warps, {stages} stages"
            config = Config(m, tile, warps, stages)
            bench.recorder.measure(
                "sweep",
                name,
                partial(decode_in_graph, bench, *point, 16, config),
                peer=True,  # a cut may need more shared memory than there is
            )
        bench.recorder.measure("sweep", f"{label} by the rule", partial(decode_in_graph, bench, *point))


def decode_m(bench: Bench) -> int:
    """Queries of a product in decode, a power of two from 16 on."""
    shape = bench.sizes.layer
    return max(16, 1 << (shape.heads // shape.kv_heads - 1).bit_length())


def decode_in_graph(
    bench: Bench, batch: int, length: int, block_size: int = 16, config: Config | None = None, without: bool = False
) -> dict[str, Any]:
    """Time decode at one point.

    Args:
        without: also without a graph.
    """
    shape = bench.sizes.layer
    nbytes = batch * length * shape.token_bytes
    count = bench.layers_for(nbytes)
    layers = Layers(bench, shape, batch, length, block_size, count)

    def all_layers() -> None:
        for storage in layers.storages:
            bench.kernels.decode(layers.query, storage, layers.plan, scale=shape.scale, config=config)

    with watched_splits(bench.kernels) as splits:
        seconds = bench.median_seconds(bench.graph(all_layers)) / count
    values = bench.transfer_figures(nbytes, seconds)
    values |= {"splits": splits[-1] if splits else None, "kv_mb": nbytes / 1e6, "layers": count}
    if without:
        values["us_without_graph"] = bench.median_seconds(all_layers) / count * 1e6
    return values


@contextlib.contextmanager
def watched_splits(kernels: Any) -> Iterator[list[int]]:
    """The numbers of splits that the rule gives to the calls inside."""
    rule, seen = kernels.num_splits, []

    def watch(*args: Any, **kwargs: Any) -> int:
        seen.append(rule(*args, **kwargs))
        return seen[-1]

    kernels.num_splits = watch
    try:
        yield seen
    finally:
        kernels.num_splits = rule


def decode_target(bench: Bench, batch: int, length: int, values: dict[str, Any]) -> Target | None:
    share = values["share_of_copy"]
    if not bench.on_gpu or share is None:
        return None
    if batch * length * bench.sizes.layer.token_bytes >= 512e6:
        return Target("0.85 of the copy bandwidth", share >= 0.85)
    if (batch, length) == (8, 4096):
        return Target("0.70 of the copy bandwidth", share >= 0.70)
    return None


def host_cost(bench: Bench) -> dict[str, Any]:
    """What a call costs on the host, at batch 1 with a row so short that the device keeps up."""
    shape, calls = bench.sizes.layer, bench.sizes.host_calls
    layers = Layers(bench, shape, 1, 16)
    key = torch.randn(1, shape.kv_heads, 1, shape.dim, device=bench.device).to(shape.dtype)
    storage, plan = layers.storages[0], layers.plan

    def cost(call: Callable[[], object]) -> float:
        call()
        bench.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - began
        bench.synchronize()
        return elapsed / calls * 1e6

    return {
        "decode_host_us": cost(lambda: bench.kernels.decode(layers.query, storage, plan, scale=shape.scale)),
        "write_host_us": cost(lambda: bench.kernels.write(storage, key, key, plan)),
    }
