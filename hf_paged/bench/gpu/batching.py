"""Many prompts on a whole model with random weights: generate_many beside generate_batch and padded generate()."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_paged.bench.batching import Workload, generate_batch, generate_padded, spread, without_eos
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.generate import Generation
from hf_paged.bench.gpu.recorder import Skip
from hf_paged.bench.gpu.results import Result, Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_batching(bench: Bench) -> None:
    made: list[Batching] = []

    def run(name: str) -> dict[str, Any] | Result:
        if not made:
            made.append(Batching(bench))
        return made[0].measure(name)

    for name in ("padded generate()", "generate_many"):
        bench.recorder.measure("batching", name, partial(run, name))
    bench.recorder.measure("batching", "generate_batch", partial(run, "generate_batch"), peer=True, cap=60.0)


class Batching:
    """One workload of ragged prompts and answers, and the ways to do it."""

    def __init__(self, bench: Bench) -> None:
        from hf_paged import enable_paged_attention

        self.bench = bench
        count, longest, most = bench.sizes.many
        self.workload = Workload("many", spread(longest // 16 + 1, longest, count), spread(most // 16 + 1, most, count))
        model = Generation(bench).model
        self.plain: PreTrainedModel = without_eos(model)
        self.ours: PreTrainedModel = without_eos(model)
        enable_paged_attention(self.ours, compile=False)
        self.ids = self.workload.ids(model.config.vocab_size)
        self.tokens: dict[str, list[list[int]]] = {}
        self.seconds: dict[str, float] = {}

    def measure(self, name: str) -> dict[str, Any] | Result:
        """The second of two runs: the first compiles kernels and records graphs."""
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "padded generate()": self._padded,
            "generate_many": self._many,
            "generate_batch": self._batch,
        }
        for _ in range(2 if self.bench.on_gpu else 1):
            self.bench.synchronize()
            began = time.perf_counter()
            self.tokens[name] = runs[name]()
            self.bench.synchronize()
            self.seconds[name] = time.perf_counter() - began
        values: dict[str, Any] = {
            "total_s": self.seconds[name],
            "tokens_per_s": sum(self.workload.new_tokens) / self.seconds[name],
        }
        padded = self.tokens["padded generate()"]
        rows = zip(padded, self.tokens[name], strict=True)
        same = [a == b for row, other in rows for a, b in zip(row, other, strict=True)]
        values["equal_tokens"] = sum(same) / len(same)
        if name != "generate_many":
            return values
        values["times_padded"] = self.seconds["padded generate()"] / self.seconds[name]
        target = Target("faster than padded generate()", values["times_padded"] > 1) if self.bench.on_gpu else None
        return Result("", "", values, target=target)

    def _padded(self) -> list[list[int]]:
        tokens = []
        for first in range(0, len(self.ids), 32):
            wanted = self.workload.new_tokens[first : first + 32]
            output = generate_padded(self.plain, self.ids[first : first + 32], max(wanted))
            tokens += [row[:count] for row, count in zip(output, wanted, strict=True)]
        return tokens

    def _many(self) -> list[list[int]]:
        from hf_paged import Request, generate_many, use_backend

        requests = [
            Request(prompt, max_new_tokens=count)
            for prompt, count in zip(self.ids, self.workload.new_tokens, strict=True)
        ]
        blocks = sum(-(-(len(prompt) + n) // 16) for prompt, n in zip(self.ids, self.workload.new_tokens, strict=True))
        with use_backend("triton"):
            results = generate_many(self.ours, requests, num_blocks=blocks, do_sample=False, progress=False)
        return [result.tokens for result in results]

    def _batch(self) -> list[list[int]]:
        if not self.bench.on_gpu:
            raise Skip("it is made for GPUs")
        self.plain.set_attn_implementation("sdpa")
        return generate_batch(self.plain, self.ids, self.workload.new_tokens)
