"""Prefill of whole prompts beside its peers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.layers import Layers
from hf_paged.bench.gpu.peers import sdpa_prefill, varlen_prefill
from hf_paged.bench.gpu.results import Result, Target


def measure_prefill(bench: Bench) -> None:
    recorder, shape = bench.recorder, bench.sizes.layer

    def paged(rows: int, length: int) -> Result:
        layers = Layers(bench, shape, rows, length, q_len=length)
        new = torch.empty(2, rows, shape.kv_heads, length, shape.dim, dtype=shape.dtype, device=bench.device)

        def call() -> Tensor:
            return bench.kernels.prefill(
                layers.query, new[0], new[1], layers.storages[0], layers.plan, scale=shape.scale
            )

        values = bench.prefill_figures(rows, length, bench.median_seconds(bench.graph(call)))
        flash = recorder.value("prefill", f"{rows} x {length:,} sdpa, flash", "ms")
        target = None
        if flash:
            values["times_flash"] = flash / values["ms"]
            if bench.on_gpu and length >= 4096:
                target = Target("0.9 of SDPA's flash", values["times_flash"] >= 0.9)
        return Result("", "", values, target=target)

    for prompt in bench.sizes.prompts:
        label = f"{prompt[0]} x {prompt[1]:,}"
        for short, backend in (("flash", "FLASH_ATTENTION"), ("cuDNN", "CUDNN_ATTENTION")):
            sdpa = partial(sdpa_prefill, bench, backend, *prompt)
            recorder.measure("prefill", f"{label} sdpa, {short}", sdpa, peer=True)
        recorder.measure("prefill", f"{label} varlen_attn", partial(varlen_prefill, bench, *prompt), peer=True)
        recorder.measure("prefill", f"{label} paged", partial(paged, *prompt))
