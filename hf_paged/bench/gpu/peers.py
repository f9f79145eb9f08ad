"""What decode and prefill are compared with: torch's SDPA on keys and values side by side, and its `varlen_attn`."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.recorder import Skip, describe_error


def sdpa_decode(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    """torch's SDPA on keys and values that lie side by side, as many layers in turn."""
    shape = bench.sizes.layer
    nbytes = batch * length * shape.token_bytes
    count = bench.layers_for(nbytes)
    options: dict[str, Any] = {"device": bench.device, "dtype": shape.dtype}
    layers = [torch.randn(2, batch, shape.kv_heads, length, shape.dim, **options) for _ in range(count)]
    query = torch.randn(batch, shape.heads, 1, shape.dim, **options)

    def all_layers() -> None:
        for key, value in layers:
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return _decode_values(bench, nbytes, count, all_layers)


def sdpa_prefill(bench: Bench, backend: str, rows: int, length: int) -> dict[str, Any]:
    """torch's SDPA, forced to one backend, on keys and values that lie side by side."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = bench.sizes.layer
    notes: list[str] = []
    options: dict[str, Any] = {"device": bench.device, "dtype": shape.dtype}
    query = torch.randn(rows, shape.heads, length, shape.dim, **options)
    key, value = torch.randn(2, rows, shape.kv_heads, length, shape.dim, **options)

    def call() -> Tensor:
        grouped = key.shape[1] != shape.heads
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel([getattr(SDPBackend, backend)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except RuntimeError:
            key, value = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in (key, value))
            call()
            notes.append("KV heads repeated beforehand")
        seconds, note = _time(bench, call, *notes)
    return bench.prefill_figures(rows, length, seconds) | note


def varlen_decode(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    return Varlen.found(bench).decode(batch, length)


def varlen_prefill(bench: Bench, rows: int, length: int) -> dict[str, Any]:
    return Varlen.found(bench).prefill(rows, length)


class Varlen:
    """torch's `varlen_attn` over a block table.

    Args:
        page: tokens of a page.
        with_lengths: whether it is told where each row's keys begin, besides the table.

    Raises:
        Skip: this torch has none.
    """

    def __init__(self, bench: Bench, page: int, with_lengths: bool) -> None:
        self.bench, self.page, self.with_lengths = bench, page, with_lengths
        if not bench.on_gpu:
            raise Skip("it needs a CUDA device")
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise Skip("this torch has no torch.nn.attention.varlen") from None
        self.function: Any = varlen_attn
        arguments = inspect.signature(varlen_attn).parameters
        if not {"block_table", "seqused_k"} <= arguments.keys():
            raise Skip("this torch's varlen_attn takes no block table")
        self.extra: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in arguments else {}
        self.extra |= {"window_size": (-1, 0)} if "window_size" in arguments else {"is_causal": True}

    @staticmethod
    def probe(bench: Bench) -> dict[str, Any]:
        """The smallest page that it takes and computes right, and how it is called."""
        refusals: dict[str, None] = {}
        for page, with_lengths in itertools.product((16, 32, 64, 128, 256), (True, False)):
            varlen = Varlen(bench, page, with_lengths)
            try:
                if varlen._is_right():
                    return {"page": page, "with_lengths": with_lengths}
                refusals[f"pages of {page}: wrong results"] = None
            except Exception as error:
                refusals[describe_error(error)] = None
                bench.synchronize()
        raise Skip("; ".join(refusals)[:600])

    @staticmethod
    def found(bench: Bench) -> Varlen:
        """As the probe, which is a measurement of its own, found it to work."""
        probed = bench.recorder.find("machine", "varlen_attn")
        if probed is None or not probed.values:
            raise Skip((probed.skipped if probed else None) or "it was not probed")
        return Varlen(bench, probed.values["page"], probed.values["with_lengths"])

    def _is_right(self) -> bool:
        shape, length = self.bench.sizes.layer, 2 * self.page
        inputs = self.inputs(2, length, q_len=length)
        out = self.call(inputs, inputs["pages"][0]).view(2, length, shape.heads, shape.dim).transpose(1, 2)
        pages = inputs["pages"][0][:, inputs["table"].long()]  # [2, rows, pages, page, kv_heads, dim]
        key, value = pages.flatten(2, 3).transpose(2, 3)
        query = inputs["query"].view(2, length, shape.heads, shape.dim).transpose(1, 2)
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return (out - expected).abs().max().item() < 0.05

    def inputs(self, rows: int, length: int, q_len: int, count: int = 1) -> dict[str, Any]:
        """`query` `[rows * q_len, heads, dim]`; `pages`, of each layer `[2, pages, page, kv_heads, dim]`; the rest."""
        shape, device = self.bench.sizes.layer, self.bench.device
        options: dict[str, Any] = {"device": device, "dtype": shape.dtype}
        each = -(-length // self.page)
        pages = (2, rows * each, self.page, shape.kv_heads, shape.dim)
        whole: dict[str, Any] = {"device": device, "dtype": torch.int32}
        return {
            "query": torch.randn(rows * q_len, shape.heads, shape.dim, **options),
            "pages": [torch.randn(pages, **options) for _ in range(count)],
            "table": torch.randperm(rows * each, device=device).int().view(rows, each),
            "query_starts": torch.arange(rows + 1, **whole) * q_len,
            "key_starts": torch.arange(rows + 1, **whole) * length if self.with_lengths else None,
            "lengths": torch.full((rows,), length, **whole),
            "longest": (q_len, length),
        }

    def call(self, inputs: dict[str, Any], pages: Tensor) -> Tensor:
        return self.function(
            inputs["query"],
            pages[0],
            pages[1],
            inputs["query_starts"],
            inputs["key_starts"],
            *inputs["longest"],
            seqused_k=inputs["lengths"],
            block_table=inputs["table"],
            **self.extra,
        )

    def decode(self, batch: int, length: int) -> dict[str, Any]:
        bench, shape = self.bench, self.bench.sizes.layer
        nbytes = batch * length * shape.token_bytes
        count = bench.layers_for(nbytes)
        inputs = self.inputs(batch, length, 1, count)

        def all_layers() -> None:
            for pages in inputs["pages"]:
                self.call(inputs, pages)

        return _decode_values(bench, nbytes, count, all_layers, f"pages of {self.page}")

    def prefill(self, rows: int, length: int) -> dict[str, Any]:
        inputs = self.inputs(rows, length, length)
        seconds, note = _time(self.bench, lambda: self.call(inputs, inputs["pages"][0]), f"pages of {self.page}")
        return self.bench.prefill_figures(rows, length, seconds) | note


def _time(bench: Bench, call: Callable[[], object], *notes: str) -> tuple[float, dict[str, str]]:
    """Seconds in a graph, or without one where it cannot be captured; and what is to be noted, of that too."""
    try:
        seconds = bench.median_seconds(bench.graph(call))
    except RuntimeError:
        bench.synchronize()
        seconds = bench.median_seconds(call)
        notes += ("without a graph",)
    return seconds, {"note": ", ".join(notes)} if notes else {}


def _decode_values(bench: Bench, nbytes: int, count: int, call: Callable[[], object], *notes: str) -> dict[str, Any]:
    """Of a call that goes through `count` layers of `nbytes` each."""
    seconds, note = _time(bench, call, *notes)
    return bench.transfer_figures(nbytes, seconds / count) | {"kv_mb": nbytes / 1e6, "layers": count} | note
