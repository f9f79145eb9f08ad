"""Models and settings that several test files use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# Before anything imports a Triton kernel: what is decorated afterwards runs in the interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

from hf_paged.models import DemoModelMissingError, load_demo_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase


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
