"""Everything that generate() offers: equal to what it gives with DynamicCache, or refused by name.

`patches/GENERATE.md` is written by this file: `HF_PAGED_WRITE_DOCS=1 pytest tests/test_features.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    CACHE_ARGUMENT,
    check_books,
    model_with_mtp_layers,
    mtp_layers_at_random,
    pad_left,
    random_prompts,
    run_way,
)
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
    pipeline,
)

from hf_paged import PagedCache
from hf_paged.patches import compiled

PAGE = Path(__file__).parent.parent / "patches" / "GENERATE.md"
WAYS = {"as it is": "plain", "enabled": "cpu", "compiled": "compiled"}
NEW = 8
end_step = compiled.end_step


@dataclass
class Bench:
    """A model, a tokenizer, and a left-padded batch of prompts."""

    model: PreTrainedModel
    tokenizer: Any
    ids: torch.Tensor
    mask: torch.Tensor
    real: tuple[PreTrainedModel, Any] | None = None
    """A model that answers in words, and its tokenizer."""

    def cache(self, way: str | None) -> dict[str, Any]:
        """The argument for a way; `None` is DynamicCache."""
        config = self.model.config
        return {CACHE_ARGUMENT: DynamicCache(config=config) if way is None else PagedCache(config, num_blocks=400)}

    def generate(self, way: str | None, rows: slice = slice(None), **options: Any) -> Any:
        torch.manual_seed(11)
        cache = self.cache(way)
        options = {"max_new_tokens": NEW, "do_sample": False, **options}
        prompt = {} if "inputs_embeds" in options else {"input_ids": self.ids[rows]}
        with run_way(self.model, way) if way else torch.no_grad():
            output = self.model.generate(**prompt, attention_mask=self.mask[rows], **cache, **options)
        if way:
            check_books(cache[CACHE_ARGUMENT])
        return output


Feature = Callable[[Bench, str | None], Any]
FEATURES: dict[str, Feature] = {}


def feature(name: str) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[name] = function
        return function

    return add


def with_options(name: str, rows: slice = slice(None), **options: Any) -> None:
    FEATURES[name] = lambda bench, way: bench.generate(way, rows, **options)


ONE_ROW = slice(0, 1)
SAMPLE = {"do_sample": True, "top_k": 0}
with_options("greedy")
with_options("sampling", **SAMPLE)
for warper, value in {
    "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.8, "epsilon_cutoff": 0.003,
    "eta_cutoff": 0.003, "top_h": 0.5,
}.items():  # fmt: skip
    with_options(f"sampling, `{warper}`", **(SAMPLE | {warper: value}))
with_options("`num_return_sequences`", num_return_sequences=3, **SAMPLE)
with_options("beam search", num_beams=3)
with_options("beam search, `length_penalty`, `early_stopping`", num_beams=3, length_penalty=2.0, early_stopping=True)
with_options("beam search, several sequences", num_beams=4, num_return_sequences=2)
with_options("beam sampling", num_beams=3, do_sample=True)
with_options("`prefix_allowed_tokens_fn`", prefix_allowed_tokens_fn=lambda row, ids: [3, 5, 8 + len(ids)])
with_options(
    "`prefix_allowed_tokens_fn` with beams", num_beams=2, prefix_allowed_tokens_fn=lambda row, ids: [3, 5, 8 + len(ids)]
)
with_options("`repetition_penalty`, `no_repeat_ngram_size`", repetition_penalty=1.4, no_repeat_ngram_size=2)
with_options("`bad_words_ids`, `suppress_tokens`", bad_words_ids=[[7], [3, 4]], suppress_tokens=[11, 12])
with_options("`sequence_bias`", sequence_bias={(5,): 3.0})
with_options("`forced_eos_token_id`, `eos_token_id`", forced_eos_token_id=5, eos_token_id=5)
with_options("`min_new_tokens`", min_new_tokens=6, eos_token_id=list(range(0, 200, 3)))
with_options("rows that end at different times", eos_token_id=list(range(0, 200, 6)), max_new_tokens=20)
with_options("`max_time`", max_time=60.0)
with_options("`guidance_scale`", guidance_scale=1.7)
with_options("`negative_prompt_ids`", ONE_ROW, guidance_scale=1.7, negative_prompt_ids=torch.tensor([[4, 9, 30]]))
with_options("`renormalize_logits`, `remove_invalid_values`", renormalize_logits=True, remove_invalid_values=True)
with_options("`prefill_chunk_size`", prefill_chunk_size=6)
with_options("`prompt_lookup_num_tokens`", ONE_ROW, prompt_lookup_num_tokens=3)


@feature("assisted decoding, `assistant_model`")
def _(bench: Bench, way: str | None) -> Any:
    assistant = bench.model
    return bench.generate(way, ONE_ROW, assistant_model=assistant)


with_options("`assistant_early_exit`", ONE_ROW, assistant_early_exit=1)


@feature("`use_mtp`")
def _(bench: Bench, way: str | None) -> Any:
    model = model_with_mtp_layers()
    own = Bench(model, bench.tokenizer, bench.ids[ONE_ROW], bench.mask[ONE_ROW])
    with mtp_layers_at_random():
        return own.generate(way, use_mtp=True)


@feature("`custom_generate`, a function")
def _(bench: Bench, way: str | None) -> Any:
    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get(CACHE_ARGUMENT)
        mask = kwargs["attention_mask"]
        mask = torch.ones_like(input_ids) if mask is None else mask
        new = input_ids
        for _ in range(4):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            with torch.no_grad():
                logits = model(new, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits
            new = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, new], 1)
            mask = torch.cat([mask, torch.ones_like(new)], 1)
        return input_ids

    return bench.generate(way, custom_generate=loop)


@feature("streamers, `TextIteratorStreamer` in a thread")
def _(bench: Bench, way: str | None) -> Any:
    streamer = TextIteratorStreamer(bench.tokenizer)
    outcome: list[Any] = []
    run = threading.Thread(target=lambda: outcome.append(bench.generate(way, ONE_ROW, streamer=streamer)))
    run.start()
    text = "".join(streamer)
    run.join()
    return outcome[0], text


@feature("stopping criteria")
def _(bench: Bench, way: str | None) -> Any:
    class Ends(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] > bench.ids.shape[1] + 2 + row for row in range(len(input_ids))])

    return bench.generate(way, stopping_criteria=StoppingCriteriaList([Ends()]), eos_token_id=0)


@feature("`stop_strings`")
def _(bench: Bench, way: str | None) -> Any:
    model, tokenizer = bench.real
    inputs = tokenizer("One, two, three,", return_tensors="pt")
    real = Bench(model, tokenizer, inputs["input_ids"], inputs["attention_mask"])
    tokens = real.generate(way, stop_strings=["six"], tokenizer=tokenizer, max_new_tokens=12)
    assert tokenizer.decode(tokens[0]).endswith("four, five, six")
    return tokens


@feature("logits processors")
def _(bench: Bench, way: str | None) -> Any:
    return bench.generate(way, logits_processor=LogitsProcessorList([MinLengthLogitsProcessor(30, 5)]), eos_token_id=5)


@feature("watermarking")
def _(bench: Bench, way: str | None) -> Any:
    return bench.generate(way, watermarking_config=WatermarkingConfig(bias=3.0), **SAMPLE)


@feature("`return_dict_in_generate` with scores and logits")
def _(bench: Bench, way: str | None) -> Any:
    out = bench.generate(way, return_dict_in_generate=True, output_scores=True, output_logits=True)
    return out.sequences, out.scores, out.logits


@feature("`output_hidden_states`")
def _(bench: Bench, way: str | None) -> Any:
    out = bench.generate(way, ONE_ROW, return_dict_in_generate=True, output_hidden_states=True)
    return out.sequences, out.hidden_states


@feature("`output_attentions`")
def _(bench: Bench, way: str | None) -> Any:
    implementation = bench.model.config._attn_implementation
    if way != "cpu":  # an enabled model computes them the dense way
        bench.model.set_attn_implementation("eager")
    try:
        out = bench.generate(way, ONE_ROW, return_dict_in_generate=True, output_attentions=True)
    finally:
        if way != "cpu":
            bench.model.set_attn_implementation(implementation)
    return out.sequences, out.attentions


@feature("`inputs_embeds`")
def _(bench: Bench, way: str | None) -> Any:
    return bench.generate(way, inputs_embeds=bench.model.get_input_embeddings()(bench.ids))


@feature('`pipeline("text-generation")`')
def _(bench: Bench, way: str | None) -> Any:
    generator = pipeline("text-generation", model=bench.model, tokenizer=bench.tokenizer)
    generator.tokenizer.pad_token = generator.tokenizer.eos_token
    generator.tokenizer.padding_side = "left"
    with run_way(bench.model, way) if way else torch.no_grad():
        answers = generator(["w5 w7 w9", "w3"], batch_size=2, max_new_tokens=5, do_sample=False, **bench.cache(way))
    return [answer[0]["generated_text"] for answer in answers]


@feature("PEFT adapters (LoRA), on and off")
def _(bench: Bench, way: str | None) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = LlamaForCausalLM(bench.model.config).eval()
    model.load_state_dict(bench.model.state_dict())
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    )
    outcomes = []
    with run_way(adapted, way) if way else torch.no_grad():
        for on in (True, False):
            options = {"input_ids": bench.ids, "attention_mask": bench.mask, "max_new_tokens": NEW, "do_sample": False}
            if on:
                outcomes.append(adapted.generate(**options, **bench.cache(way)))
            else:
                with adapted.disable_adapter():
                    outcomes.append(adapted.generate(**options, **bench.cache(way)))
    assert not torch.equal(*outcomes)
    return outcomes


@feature("8-bit weights (torch's dynamic quantization)")
def _(bench: Bench, way: str | None) -> Any:
    model = LlamaForCausalLM(bench.model.config).eval()
    model.load_state_dict(bench.model.state_dict())
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return Bench(model, bench.tokenizer, bench.ids, bench.mask).generate(way)


@feature("`torch.inference_mode`, `torch.no_grad`")
def _(bench: Bench, way: str | None) -> Any:
    outcomes = []
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            outcomes.append(bench.generate(way))
    return outcomes


@feature("autocast to bfloat16 (logits close)")
def _(bench: Bench, way: str | None) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        out = bench.generate(way, max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
    return [logits.float() * 0.01 for logits in out.logits]  # 8 bits hold two or three digits


def same(one: Any, other: Any) -> bool:
    """Equal tokens and texts, close numbers; nested as they may be."""
    if isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return False
        if other.dtype.is_floating_point:
            return torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
        return torch.equal(one, other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.fixture(scope="module")
def bench(tiny_llama: LlamaForCausalLM, tiny_llama_folder: Path, smollm2: tuple) -> Bench:
    ids, mask = pad_left([row for row in (random_prompts([n], seed=n)[0][0] for n in (5, 17, 9))])
    return Bench(tiny_llama, AutoTokenizer.from_pretrained(tiny_llama_folder), ids, mask, smollm2)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    return {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_equal_or_refused(
    name: str, bench: Bench, outcomes: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(compiled, "end_step", lambda *args: ended.append(args) or end_step(*args))
    expected = FEATURES[name](bench, None)
    for label, way in WAYS.items():
        try:
            actual = FEATURES[name](bench, way)
        except NotImplementedError as error:
            outcome = f"refused: {error}"
        else:
            assert same(actual, expected), f"{name}, {label}: other than with DynamicCache"
            outcome = "equal" if way != "compiled" or ended else "equal, eager"
        outcomes.setdefault(name, {})[label] = outcome


def test_the_page_says_what_was_found(outcomes: dict[str, dict[str, str]]) -> None:
    if set(outcomes) != set(FEATURES):
        pytest.skip("needs all features")  # some were deselected, or need the small model; .ci/run has them all
    lines = [
        "# What generate() offers",
        "",
        "Each line was run with a small random Llama in float32: tokens (and scores, hidden states, attention weights)",
        "of a `PagedCache`, on the model as it is and after `enable_paged_attention(model)`, against `DynamicCache`.",
        "In the last column generate() was told to compile its decode steps; `eager` says where transformers, or we,",
        "compile none. This page is written by `tests/test_features.py`, which fails where it is not true.",
        "",
        "| | as it is | enabled | enabled, compiled |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(outcomes[name][label] for label in WAYS)} |" for name in FEATURES),
        "",
        "Contrastive search, DoLa, group beam search and constrained beam search are no part of transformers any more;",
        "they live in repositories of the hub, and were not run.",
        "",
    ]
    text = "\n".join(lines)
    if os.environ.get("HF_PAGED_WRITE_DOCS"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text
