"""Are the kernels right on this machine? Storing, prefill, decode and copies against attention in float64, and a whole
model against the ordinary cache."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_paged.cache import PagedCache
from hf_paged.doctor.backends import DTYPES, WORDS, devices
from hf_paged.doctor.findings import Finding, Status
from hf_paged.kernels import select
from hf_paged.models import cache_keyword, quiet
from hf_paged.patches.enable import paged_attention
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

LENGTHS = (1, 17, 70)  # within a block, just over one, and several
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 64, 16
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 9, "softcap": 4.0})
NEAR_TIE = 1e-4


def check_kernels() -> list[Finding]:
    """Each backend that can serve a device here, with each dtype that it serves."""
    found = []
    for device in devices():
        for name in dict.fromkeys((select.DEFAULTS.get(device.type, "reference"), "reference")):
            found.append(check_backend(name, device))
    return found


def _without_variables() -> str:
    """What to try before a fault is reported, where the environment may be its cause."""
    variables = (select.ENVIRONMENT_VARIABLE, "NUMBA_DISABLE_JIT")
    found = [name for name in variables if os.environ.get(name, "0") not in ("", "0")]
    return f"unset {' and '.join(found)}, and see whether this goes away" if found else ""


def check_backend(name: str, device: torch.device) -> Finding:
    """Compare a backend with float64."""
    title = f"{name} on {device}"
    try:
        backend = importlib.import_module(select.BACKENDS[name])
    except Exception as error:  # whatever a broken installation raises
        text = f"cannot be imported: {type(error).__name__}: {error}"
        return Finding(title, Status.warning, text, f"without it a slower way is taken; {WORDS[name]} would be faster")
    served, skipped, wrong = [], [], []
    for dtype in DTYPES:
        case = _Case(dtype, device)
        word = str(dtype).removeprefix("torch.")
        if reason := backend.unsupported(dtype, case.storage):
            skipped.append(reason)
            continue
        try:
            wrong += [f"{word}: {fault}" for fault in case.faults(backend)]
            served.append(word)
        except Exception as error:  # a kernel that does not compile, or breaks off
            lines = str(error).strip().splitlines()
            wrong.append(f"{word}: {type(error).__name__}: {lines[-1] if lines else ''}")
    if wrong:
        advice = "use HF_PAGED_BACKEND=reference meanwhile, and report this with the output of `hf-paged doctor --json`"
        return Finding(title, Status.failed, "; ".join(wrong), _without_variables() or advice)
    if not served:
        return Finding(title, Status.note, f"serves nothing here: {skipped[0]}")
    more = f"; not checked: {'; '.join(skipped)}" if skipped else ""
    text = f"storing, prefill, decode and copies agree with float64, for {', '.join(served)}{more}"
    return Finding(title, Status.ok, text)


class _Case:
    """Rows of tokens in a pool full of NaN, under a shuffled block table."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.dtype, self.device = dtype, device
        rows, longest = len(LENGTHS), max(LENGTHS)
        self.key, self.value = random(rows, KV_HEADS, longest, DIM), random(rows, KV_HEADS, longest, DIM)
        self.query = random(rows, HEADS, longest, DIM)
        per_row = -(-longest // BLOCK_SIZE)
        num_blocks = rows * per_row + 1  # the last one to copy to
        self.storage = LayerStorage(num_blocks, BLOCK_SIZE, KV_HEADS, DIM, DIM, dtype, dtype, device)
        self.storage.key_blocks.fill_(math.nan)
        self.storage.value_blocks.fill_(math.nan)
        order = torch.randperm(num_blocks - 1, generator=generator)
        self.table = order.view(rows, per_row).int().to(device)

    def plan(self, lengths: list[int], positions: Tensor) -> GroupPlan:
        """Of a step after which rows have these lengths; positions `[rows, q_len]`."""
        context = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        return GroupPlan(self.table, context, positions.int().contiguous().to(self.device), max(lengths))

    def faults(self, backend: Any) -> list[str]:
        """What is wrong, in words."""
        found = []
        before = [length - 1 for length in LENGTHS]  # all but the last token come as prompts, it comes alone
        place = torch.arange(max(before))
        prompt = self.plan(before, torch.where(place < torch.tensor(before)[:, None], place, -1))
        new = slice(0, max(before))
        backend.write(self.storage, self.key[:, :, new], self.value[:, :, new], prompt)
        for options in OPTIONS:
            args = (self.query[:, :, new], self.key[:, :, new], self.value[:, :, new], self.storage, prompt)
            out = backend.prefill(*args, scale=DIM**-0.5, **options)
            for row, count in enumerate(before):
                if not self.is_close(out[row, :count], row, torch.arange(count), options):
                    found.append(f"prefill of row {row} {options or ''}".strip())
        last = torch.tensor(LENGTHS)[:, None] - 1
        step = self.plan(list(LENGTHS), last)
        newest = [
            torch.stack([tensor[row, :, length - 1 : length] for row, length in enumerate(LENGTHS)])
            for tensor in (self.query, self.key, self.value)
        ]
        backend.write(self.storage, newest[1], newest[2], step)
        for options in OPTIONS:
            out = backend.decode(newest[0], self.storage, step, scale=DIM**-0.5, **options)
            for row in range(len(LENGTHS)):
                if not self.is_close(out[row], row, last[row], options):
                    found.append(f"decode of row {row} {options or ''}".strip())
        for blocks, dense in ((self.storage.key_blocks, self.key), (self.storage.value_blocks, self.value)):
            for row, length in enumerate(LENGTHS):
                stored = blocks[self.table[row].long()].transpose(0, 1).flatten(1, 2)  # [kv_heads, slots, dim]
                if not torch.equal(stored[:, :length], dense[row, :, :length]):
                    found.append(f"storing row {row}")
        source, target = int(self.table[2, 0]), self.storage.key_blocks.shape[0] - 1
        backend.copy_blocks(self.storage, [(source, target)])
        for blocks in (self.storage.key_blocks, self.storage.value_blocks):
            if not torch.equal(blocks[source], blocks[target]):
                found.append("copying a block")
        return found

    def is_close(self, out: Tensor, row: int, positions: Tensor, options: dict[str, Any]) -> bool:
        """Whether `[tokens, heads, dim]` is what float64 gives at these positions of a row."""
        group = HEADS // KV_HEADS
        key, value = (
            tensor[row].cpu().double().repeat_interleave(group, dim=0) for tensor in (self.key, self.value)
        )  # [heads, longest, dim]
        scores = self.query[row, :, positions].cpu().double() @ key.transpose(1, 2) * DIM**-0.5
        if softcap := options.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        place, where = torch.arange(key.shape[1]), positions[:, None]
        seen = (place <= where) & (place > where - options.get("window", key.shape[1]))
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        expected = (weights @ value).transpose(0, 1)
        # Matrix units round the weights to the dtype, too.
        tolerance = 2e-5 if self.dtype == torch.float32 else 2 * torch.finfo(self.dtype).eps
        return torch.allclose(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


# A whole model -----------------------------------------------------------------------------------------------------


def check_models() -> list[Finding]:
    """A tiny random Llama on each device."""
    return [check_model(device) for device in devices()]


@torch.no_grad()
def check_model(device: torch.device, new_tokens: int = 12) -> Finding:
    """Whether generate() gives the ordinary cache's tokens and every block comes back."""
    title = f"tiny Llama on {device}"
    advice = _without_variables() or "please report this with the output of `hf-paged doctor --json`"
    try:
        with quiet():
            model = _tiny_llama(device)
            ids = torch.randint(3, 199, (2, 23), generator=torch.Generator().manual_seed(1)).to(device)
            mask = torch.ones_like(ids)
            mask[0, :9] = 0  # the first row is shorter, and padded on the left
            ids = ids * mask
            options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
            keyword = cache_keyword(model)
            expected = model.generate(ids, **{keyword: DynamicCache(config=model.config)}, **options)
            cache = PagedCache(model.config, num_blocks=16)
            with paged_attention(model, compile=False):
                got = model.generate(ids, **{keyword: cache}, **options)
    except Exception as error:  # whatever a broken installation raises
        return Finding(title, Status.failed, f"{type(error).__name__}: {error}", advice)
    if fault := _difference(model, mask, got, expected):
        return Finding(title, Status.failed, fault, advice)
    cache.reset()
    if used := cache.stats().used_blocks:
        return Finding(title, Status.failed, f"{used} blocks did not come back", advice)
    return Finding(title, Status.ok, "generate() gives the ordinary cache's tokens, and all blocks come back")


def _tiny_llama(device: torch.device) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(vocab_size=199, num_key_value_heads=2, head_dim=16, initializer_range=0.2, **sizes, **ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).eval()
    return model.to(device)


def _difference(model: Any, mask: Tensor, got: Tensor, expected: Tensor) -> str | None:
    """Where tokens differ, unless a run in float64 finds the two best logits so close that rounding decides."""
    for row in range(len(expected)):
        different = (got[row] != expected[row]).nonzero().flatten()
        if not len(different):
            continue
        first = int(different[0])
        tokens = expected[row, int((mask[row] == 0).sum()) : first].cpu()
        logits = model.cpu().double()(input_ids=tokens[None], use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        if (best[0] - best[1]).item() > NEAR_TIE:
            return (
                f"row {row} has token {int(got[row, first])} where the ordinary cache gives {int(expected[row, first])}"
            )
    return None
