"""generate() of a whole model with random weights: PagedCache beside the caches and the batching of transformers."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.recorder import Skip
from hf_paged.bench.gpu.results import Result, Target
from hf_paged.bench.gpu.spread import compare_over_two_devices

if TYPE_CHECKING:
    from hf_paged import BlockPool


def measure_generate(bench: Bench) -> None:
    recorder, sizes = bench.recorder, bench.sizes
    made: list[Generation] = []

    def generation() -> Generation:
        if not made:
            made.append(Generation(bench))
        return made[0]

    def build() -> dict[str, Any]:
        return {"parameters": generation().parameters}

    def eager(batch: int) -> Result:
        this = generation()
        runs = this.eager(batch, {"dynamic": partial(this.run, this.model), "paged": this.run_paged})
        this.tokens[batch] = runs["dynamic"][0].tokens
        dynamic, paged = (this.values(batch, runs[name]) for name in ("dynamic", "paged"))
        recorder.add(Result("generate", f"{batch} x {sizes.prompt:,} DynamicCache", dynamic))
        paged["times_dynamic"] = dynamic["step_ms"] / paged["step_ms"]
        paged["backend"] = ", ".join(sorted(this.backends))
        target = Target("a step no slower than DynamicCache's", paged["times_dynamic"] >= 1) if bench.on_gpu else None
        return Result("", "", paged, target=target)

    def compiled(batch: int) -> Result:
        this = generation()
        values = this.compiled(batch)
        if not bench.on_gpu:
            return Result("", "", values)
        recorded = values["graphs"] == 1 and not values["cudagraph_skips"] and values["equal_tokens"] == 1
        return Result("", "", values, target=Target("one graph, replayed as a CUDA graph, and equal tokens", recorded))

    def batched(batch: int) -> dict[str, Any]:
        return generation().batched(batch)

    def static(batch: int) -> dict[str, Any]:
        return generation().static(batch)

    recorder.measure("generate", "the model", build)
    for batch in sizes.batches:
        label = f"{batch} x {sizes.prompt:,}"
        recorder.measure("generate", f"{label} PagedCache", partial(eager, batch))
    for batch in sizes.batches:
        label = f"{batch} x {sizes.prompt:,}"
        recorder.measure("generate", f"{label} generate_batch", partial(batched, batch), peer=True, cap=60.0)
    recorder.measure("generate", "tokens over two devices", partial(compare_over_two_devices, bench))
    # Last, since compilation is slow.
    for what, run, peer in (("PagedCache, compiled", compiled, False), ("StaticCache", static, True)):
        left = sizes.compile_cap
        for batch in sizes.batches:
            name = f"{batch} x {sizes.prompt:,} {what}"
            if left <= 0:
                recorder.skip("generate", name, f"the {sizes.compile_cap:.0f} s for it are used up")
                continue
            left -= recorder.measure("generate", name, partial(run, batch), peer=peer, cap=left).seconds


class Generation:
    """A random Llama, and the ways to run its generate()."""

    def __init__(self, bench: Bench) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from hf_paged import enable_paged_attention
        from hf_paged.bench.decode import share_weights

        self.bench, sizes = bench, bench.sizes
        options: dict[str, Any] = {**sizes.model, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        options["attn_implementation"] = "sdpa"
        config = LlamaConfig(**options)
        config.dtype = sizes.model_dtype
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(sizes.model_dtype)
        try:
            with bench.device:
                self.model: Any = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        self.model.generation_config.pad_token_id = 0
        self.paged_model: Any = share_weights(self.model)
        enable_paged_attention(self.paged_model, compile=False)
        self.compiled_model: Any = share_weights(self.model)
        enable_paged_attention(self.compiled_model, compile=True)
        self.backends: set[str] = set()
        self.tokens: dict[int, Tensor] = {}
        """What DynamicCache gave, by batch."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def prompt(self, batch: int) -> Tensor:
        """`[batch, prompt]`, int64."""
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(1, self.model.config.vocab_size, (batch, self.bench.sizes.prompt), generator=generator)
        return ids.to(self.bench.device)

    def run(self, model: Any, batch: int, new_tokens: int, **cache: Any) -> Generated:
        from transformers import StoppingCriteriaList

        ids, clock = self.prompt(batch), StepClock(self.bench)
        if self.bench.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.bench.synchronize()
        before, began = self._allocated(), time.perf_counter()
        tokens = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            **cache,
        )
        return Generated(tokens[:, ids.shape[1] :], began, clock.times, self._peak() - before)

    def run_paged(self, batch: int, new_tokens: int, pool: BlockPool | None = None) -> Generated:
        """With a pool, on the model that compiles its decode steps."""
        from hf_paged import PagedCache, use_backend
        from hf_paged.models import cache_keyword

        model = self.paged_model if pool is None else self.compiled_model
        pool = self.pool(batch, new_tokens) if pool is None else pool
        with use_backend("triton"):
            cache = PagedCache(model.config, pool=pool)
            generated = self.run(model, batch, new_tokens, **{cache_keyword(model): cache})
        self.backends |= {layer.backend.name for layer in cache.layers}
        return generated

    def pool(self, batch: int, new_tokens: int) -> BlockPool:
        from hf_paged import BlockPool

        return BlockPool(block_size=16, num_blocks=batch * -(-(self.bench.sizes.prompt + new_tokens) // 16))

    def compiled(self, batch: int) -> dict[str, Any]:
        """Compiled decode steps: once for compilation and recording, then timed, with caches on one pool."""
        from torch._dynamo.utils import counters
        from transformers import CompileConfig

        from hf_paged.patches.compiled import EAGER_BECAUSE

        on_gpu, new_tokens = self.bench.on_gpu, self.bench.sizes.new_tokens
        config = CompileConfig(fullgraph=True) if on_gpu else CompileConfig(fullgraph=True, backend="eager", mode=None)
        self.compiled_model.generation_config.compile_config = config
        pool, graphs = self.pool(batch, new_tokens), counters["stats"]["unique_graphs"]
        skips = counters["inductor"]["cudagraph_skips"]
        first, *runs = (self.run_paged(batch, new_tokens, pool) for _ in range(1 + self.bench.sizes.runs))
        refused = vars(self.compiled_model).get(EAGER_BECAUSE)
        if refused:
            raise RuntimeError(f"decode steps were not compiled: {'; '.join(refused)}")
        return self.values(batch, runs) | {
            "first_call_s": first.times[-1] - first.began,
            "graphs": counters["stats"]["unique_graphs"] - graphs,
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"] - skips,
        }

    def eager(self, batch: int, ways: dict[str, Callable[[int, int], Generated]]) -> dict[str, list[Generated]]:
        """Runs of each way, which take turns, after a short one each."""
        sizes = self.bench.sizes
        for way in ways.values():
            way(batch, min(4, sizes.new_tokens))
        runs: dict[str, list[Generated]] = {name: [] for name in ways}
        for turn in range(sizes.runs):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                runs[name].append(ways[name](batch, sizes.new_tokens))
        return runs

    def values(self, batch: int, runs: list[Generated]) -> dict[str, Any]:
        steps = [step for run in runs for step in run.steps]
        spans = [(run.times[-1] - run.times[0]) / len(run.steps) for run in runs]
        return {
            "step_ms": statistics.median(steps) * 1e3,
            "tokens_per_s": batch / statistics.median(spans),
            "first_token_ms": statistics.median(run.times[0] - run.began for run in runs) * 1e3,
            "total_s": statistics.median(run.times[-1] - run.began for run in runs),
            "peak_mb": max(run.peak_bytes for run in runs) / 1e6,
            "equal_tokens": self.equal(batch, runs[0].tokens),
        }

    def equal(self, batch: int, tokens: Tensor) -> float | None:
        expected = self.tokens.get(batch)
        if expected is None or expected.shape != tokens.shape:
            return None
        return (tokens == expected).float().mean().item()

    def batched(self, batch: int) -> dict[str, Any]:
        """transformers' continuous batching: once for its compilation and graphs, then timed."""
        if not self.bench.on_gpu:
            raise Skip("it is made for GPUs")
        if not hasattr(self.model, "generate_batch"):
            raise Skip("this transformers has no generate_batch")
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        from hf_paged.bench.decode import share_weights

        sizes = self.bench.sizes
        model: Any = share_weights(self.model)
        model.set_attn_implementation("sdpa")
        ids = self.prompt(batch)
        per_row = -(-(sizes.prompt + sizes.new_tokens) // 32)
        setting = ContinuousBatchingConfig(
            block_size=32, num_blocks=(batch + 1) * (per_row + 1), max_batch_tokens=2 * sizes.prompt
        )
        config = GenerationConfig(
            max_new_tokens=sizes.new_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1, bos_token_id=None
        )
        before = self._allocated()
        try:
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                self.bench.synchronize()
                began = time.perf_counter()
                outputs = model.generate_batch(
                    inputs=ids.tolist(),
                    generation_config=config,
                    continuous_batching_config=setting,
                    record_timestamps=True,
                    persistent_manager=True,
                )
                total = time.perf_counter() - began
                results = list(outputs.values())
                wrong = [result.error for result in results if result.error]
                if wrong or len(results) != batch:
                    raise Skip(f"generate_batch returned {len(results)} of {batch} rows: {(wrong or ['no error'])[0]}")
        finally:
            destroy = getattr(model, "destroy_cached_continuous_batching_manager", None)
            if destroy:
                destroy()
        new = [list(result.generated_tokens) for result in results]
        steps = [b - a for result in results for a, b in itertools.pairwise(result.timestamps or [])]
        span = [result.timestamps for result in results if result.timestamps]
        values = {
            "step_ms": statistics.median(steps) * 1e3 if steps else None,
            "tokens_per_s": None,
            "total_s": total,
            "peak_mb": (self._peak() - before) / 1e6,
            "equal_tokens": None,
        }
        if span:  # from the first token of all rows to the last
            seconds = max(times[-1] for times in span) - min(times[0] for times in span)
            values["tokens_per_s"] = sum(len(times) - 1 for times in span) / seconds if seconds else None
        if all(len(row) == sizes.new_tokens for row in new):
            values["equal_tokens"] = self.equal(batch, torch.tensor(new, device=ids.device))
        return values

    def static(self, batch: int) -> dict[str, Any]:
        """StaticCache, which transformers compiles on a GPU: once for that, then timed."""
        new_tokens = self.bench.sizes.new_tokens
        for _ in range(2):
            run = self.run(self.model, batch, new_tokens, cache_implementation="static")
        return self.values(batch, [run]) | {"compiled": self.bench.on_gpu}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.bench.on_gpu else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.bench.on_gpu else 0


@dataclass
class Generated:
    """One call of generate().

    Attributes:
        tokens: `[batch, new tokens]`.
        times: `time.perf_counter()` when each new token was there, the device waited for.
    """

    tokens: Tensor
    began: float
    times: list[float]
    peak_bytes: int

    @property
    def steps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


class StepClock:
    """A stopping criterion that stops nothing and notes when each token is there. generate() waits for the device at
    that place of its own accord."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.bench.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
