"""`patches/MODELS.md` is true: a sample of its classes is run, and with `-m slow` every one.

`python -m hf_paged.sweep` writes the page.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_paged.attention
from hf_paged import ContinuousBatcher
from hf_paged.batching.runner import PackedRunner
from hf_paged.layer import PagedLayer
from hf_paged.packed import PackedStep
from hf_paged.sweep.batched import POOL, shorten
from hf_paged.sweep.check import check
from hf_paged.sweep.compare import Different, Output, compare
from hf_paged.sweep.images import with_images
from hf_paged.sweep.prompts import LENGTHS, prompts, rows_of_text
from hf_paged.sweep.run import run_pairs
from hf_paged.sweep.table import PAGE, page, read
from hf_paged.sweep.tiny import build, pairs

pytestmark = pytest.mark.usefixtures("one_thread")

TOLD = read(PAGE.read_text(encoding="utf-8"))

SAMPLE = [
    "afmoe", "apertus", "bamba", "bart", "bigbird_pegasus", "blip", "blip-2", "bloom", "codegen", "cohere2", "ctrl",
    "cwm", "deepseek_v3", "dia", "diffllama", "doge", "dory", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2",
    "gemma3", "gemma3n_text", "gemma4_text", "git", "glm4", "glm_moe_dsa", "got_ocr2", "gpt2", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_speech", "jamba", "lfm2", "llama", "llama4", "mamba",
    "minimax", "ministral", "mistral", "mixtral", "mllama", "modernbert-decoder", "molmo2", "moshi", "mpt", "musicgen",
    "nllb-moe", "olmo3", "openai-gpt", "opt", "paligemma", "pegasus_x", "phi3", "qwen2_moe", "qwen2_vl", "qwen3",
    "qwen3_next", "qwen3_vl", "qwen4_exp", "roberta", "step3p7", "t5", "voxtral_realtime", "whisper", "xlstm",
]  # fmt: skip
"""Model types: every outcome, every kind of layers, and all that the sweep once found to be wrong."""

EVERY_VERSION = [
    "bloom", "deepseek_v3", "falcon_h1", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "qwen3_next", "whisper",
]  # fmt: skip
"""Of each kind one, for versions that the page is not of."""

of_this_version = pytest.mark.skipif(
    f"transformers\n{transformers.__version__} " not in PAGE.read_text(encoding="utf-8"),
    reason="the page is of another version of transformers",
)


@of_this_version
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair[1] in SAMPLE], ids="-".join)
def test_a_class_does_what_the_page_says(pair: tuple[str, str, str]) -> None:
    line = check(*pair)
    assert (line.outcome, line.plain, line.batched) == TOLD[pair[1:]], line


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair[1] in EVERY_VERSION], ids="-".join)
def test_a_class_is_right_in_every_version(pair: tuple[str, str, str]) -> None:
    line = check(*pair)
    assert line.outcome in ("kernel", "dense" if pair[1] == "deepseek_v3" else "kernel"), line
    assert line.plain == "equal", line
    is_refused = pair[1] in ("deepseek_v3", "falcon_h1", "qwen3_next") or line.mapping == "SPEECH_SEQ_2_SEQ"
    assert line.batched == ("refused" if is_refused else "equal"), line


@of_this_version
def test_the_page_has_every_class_once_and_none_is_wrong() -> None:
    assert list(TOLD) == [pair[1:] for pair in pairs()]
    enabled, plain, batched = zip(*TOLD.values(), strict=True)
    assert not {*enabled, *plain, *batched} & {"mismatch", "crash"}
    assert batched.count("equal") >= 185 and set(batched) <= {"equal", "refused", "no reference"}
    assert sum(outcome != "no reference" for outcome in enabled) >= 322
    assert PAGE.read_text(encoding="utf-8").count("| image |") >= 50


def test_a_page_reads_as_it_was_written() -> None:
    lines = [
        {"type": "a", "cls": "A", "mapping": "CAUSAL_LM", "kinds": ["full_attention"], "outcome": "mixed"}
        | {"given": "image", "reason": "x | y", "plain": "equal", "layers": "1 of 2"}
        | {"batched": "refused", "batched_reason": "y | z"},
        {"type": "b", "cls": "B", "mapping": "SPEECH_SEQ_2_SEQ", "kinds": [], "outcome": "no reference"}
        | {"given": "", "reason": "", "plain": "", "layers": "", "batched": "equal", "batched_reason": ""},
    ]
    assert read(page(lines)) == {("a", "A"): ("mixed", "equal", "refused"), ("b", "B"): ("no reference", "", "equal")}
    assert "takes 1 of them" in page(lines) and "| y / z |" in page(lines)


def test_batched_prompts_are_fed_in_parts_and_rows_come_and_go() -> None:
    model = build("llama", "LlamaForCausalLM", "CAUSAL_LM")
    with ContinuousBatcher(model, **POOL) as batcher:
        handles = [batcher.submit(prompt, max_new_tokens=12) for prompt in rows_of_text(model)]
        seen = set()
        while batcher.step():
            seen |= {row for row, handle in enumerate(handles) if 0 < handle._sequence.num_stored < LENGTHS[row]}
        assert [len(handle.prompt_ids) for handle in handles] == list(LENGTHS)
        assert seen == {0, 1, 2}
        assert batcher.stats().preemptions and batcher.stats().peak_running == 2


def test_a_wrong_position_of_a_late_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the batcher itself compares."""
    beside = PackedRunner.beside

    def late(runner: PackedRunner, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        return beside(runner, positions + (positions >= 15))

    monkeypatch.setattr(PackedRunner, "beside", late)
    line = check("CAUSAL_LM", "llama", "LlamaForCausalLM")
    assert (line.outcome, line.plain, line.batched) == ("kernel", "equal", "mismatch"), line


def test_refusals_that_come_late_are_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PackedStep.__init__

    def late(step: PackedStep, *args: Any) -> None:
        begin(step, *args)
        if max(step.starts) >= 15:
            raise NotImplementedError("not this far")

    monkeypatch.setattr(PackedStep, "__init__", late)
    line = check("CAUSAL_LM", "llama", "LlamaForCausalLM")
    assert line.batched == "crash" and "not this far" in line.batched_reason, line


def test_a_refusal_is_shortened_to_what_it_says_of_the_model() -> None:
    text = "XModel cannot be batched continuously: it is (a, b). Use model.generate(), with a PagedCache"
    assert shorten(text, "XModel") == "it is (a, b)"
    assert shorten("x has layers of kind y, which is new; use transformers' own", "X").endswith("which is new")


def test_images_have_as_many_tokens_as_features_and_stand_before_the_text() -> None:
    model = build("qwen2_vl", "Qwen2VLForConditionalGeneration", "IMAGE_TEXT_TO_TEXT")
    text = prompts(model)
    with torch.no_grad():
        (inputs,) = with_images(model, text)
    image = inputs["input_ids"] == model.config.image_token_id
    assert image.sum(1).tolist() == [4, 4, 4] and inputs["image_grid_thw"].tolist() == [[1, 4, 4]] * 3
    assert torch.equal(inputs["mm_token_type_ids"], image.long())
    assert inputs["attention_mask"].sum(1).tolist() == [length + 5 for length in LENGTHS]  # one begins the image
    for ids, seen, row, length in zip(inputs["input_ids"], image, text["input_ids"], LENGTHS, strict=True):
        assert torch.equal(ids[-length:], row[-length:]) and seen[-length - 4 : -length].all()
        assert not ids[: -length - 5].any()
    assert not list(with_images(build("llama", "LlamaForCausalLM", "CAUSAL_LM"), text))


def test_another_token_or_other_logits_are_noticed_unless_the_best_are_tied() -> None:
    logits = torch.zeros(2, 1, 5)
    logits[:, 0, 3] = 1.0
    expected = Output(torch.tensor([[9, 3, 3]]), logits)
    compare(expected, expected)
    with pytest.raises(Different, match="another token"):
        compare(Output(torch.tensor([[9, 3, 2]]), logits), expected)
    for wrong in (logits + torch.tensor([0, 0, 0.01, 0, 0]), logits * float("nan")):
        with pytest.raises(Different, match="logits"):
            compare(Output(expected.tokens, wrong), expected)
    tied = Output(expected.tokens, logits + torch.tensor([0, 0, 0.9999, 0, 0]))
    compare(Output(torch.tensor([[9, 2, 4]]), tied.logits), tied)


@pytest.mark.parametrize("way", ["kernel", "plain"])
def test_a_window_that_is_wrong_by_one_token_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_attend" if way == "kernel" else "_update"
    owner = hf_paged.attention if way == "kernel" else PagedLayer
    right = getattr(owner, name)

    def wrong(layer: PagedLayer, *args: Any, **kwargs: Any) -> Any:
        if layer.window is None:
            return right(layer, *args, **kwargs)
        layer.window -= 1
        try:
            return right(
                layer,
                *args,
                **{name: layer.window if name == "sliding_window" else value for name, value in kwargs.items()},
            )
        finally:
            layer.window += 1

    monkeypatch.setattr(owner, name, wrong)
    line = check("CAUSAL_LM", "mistral", "MistralForCausalLM")
    assert line.outcome == ("mismatch" if way == "kernel" else "crash"), line


def test_a_process_that_dies_or_hangs_costs_one_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = [pair for pair in pairs() if pair[1] in ("llama", "mistral")]
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time, transformers\n"
        "class Dies:\n"
        "    def __getattr__(self, name): os._exit(3)\n"
        "class Hangs:\n"
        "    def __getattr__(self, name): time.sleep(99)\n"
        "transformers.Dies, transformers.Hangs = Dies(), Hangs()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    strange = [("CAUSAL_LM", "llama", name) for name in ("Dies", "Hangs")]
    lines = run_pairs([chosen[0], *strange, chosen[1]], limit=20, tell=False)
    assert [line["outcome"] for line in lines] == ["kernel", "crash", "crash", "kernel"]
    assert [line["batched"] for line in lines] == ["equal", "crash", "crash", "equal"]
    assert "code 3" in lines[1]["reason"] and "20 s" in lines[2]["reason"]


@of_this_version
@pytest.mark.slow
def test_the_whole_page_is_true() -> None:
    lines = run_pairs(pairs())
    outcomes = {(line["type"], line["cls"]): (line["outcome"], line["plain"], line["batched"]) for line in lines}
    assert outcomes == TOLD
