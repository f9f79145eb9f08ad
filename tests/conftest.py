"""Models and settings that several test files use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is loaded. Workers share the cores, and threads of several processes that wait for each other make
    # everything several times slower; what the tests start inherits it.
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Before anything imports a Triton kernel: what is decorated afterwards runs in the interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

from hf_paged.models import DemoModelMissingError, load_demo_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase


MOST_WORKERS = 8  # each loads torch and transformers, which takes seconds and half a gigabyte


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` is: one a core for the whole suite, none but this one for a choice of tests."""
    options = config.option
    is_choice = options.keyword or options.markexpr not in ("not slow", "smoke") or getattr(options, "lf", False)
    if is_choice or options.capture == "no" or any("::" in name for name in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, MOST_WORKERS)
    if not any(Path(name).is_dir() for name in config.args):
        count = min(count, len(config.args))  # a file is never split
    return count if count > 1 else 0


LONGEST = (
    *("test_notebooks", "test_static_guard", "test_compiled", "test_triton", "test_features", "test_sweep"),
    *("test_smollm2", "test_bench_gpu"),
)
"""How the names of files begin that take half a minute or more. The first converts the real model, for all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker begins with the files that take longest, so that none is left over when the others have ended."""

    def place(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LONGEST) if item.path.stem.startswith(name)), len(LONGEST))

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=place)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer; leave the model as it is found.

    Skips where the model is not installed, unless HF_PAGED_REQUIRE_MODEL=1 says that it must be.
    """
    try:
        return load_demo_model()
    except DemoModelMissingError as error:
        if os.environ.get("HF_PAGED_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(str(error).splitlines()[0])  # a package that cannot be a dependency: .ci/run sets the variable


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """A random two-layer Llama that takes milliseconds; leave it as it is found."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_llama_folder(tiny_llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama saved with a tokenizer of whole words, which has neither a pad token nor a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 200)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    tiny_llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose by a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
