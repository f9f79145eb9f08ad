"""Models that accelerate has spread or offloaded: the same tokens, and disabling leaves accelerate's hooks as they
were. What takes two GPUs is in `hf_paged.bench.gpu.spread`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from hf_paged import IMPLEMENTATION, BlockPool, ContinuousBatcher, PagedCache, generate_many, paged_attention
from hf_paged.bench.gpu.device import Bench
from hf_paged.bench.gpu.recorder import Recorder, Skip
from hf_paged.bench.gpu.sizes import TOY_SIZES
from hf_paged.bench.gpu.spread import compare_over, compare_over_two_devices
from hf_paged.models import input_device
from tests.batching_checks import alone, prompts
from tests.helpers import build_model, generate, tiny_model

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}


def offload(model: Any, way: str, folder: Path) -> Any:
    if way == "all on the host":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if way == "all on disk":
        return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    places = PLACES | {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    if way == "the embeddings on disk":
        places = {name: "cpu" if place == "disk" else "disk" for name, place in places.items()}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("way", ("all on the host", "all on disk", "some layers on disk", "the embeddings on disk"))
@pytest.mark.filterwarnings("ignore:.*You are calling .generate.. with the .input_ids. being on a device")
def test_offloaded_models_give_the_same_tokens(way: str, tmp_path: Path) -> None:
    reference, asked = tiny_model("llama"), prompts(5, 30, 9)
    model = offload(build_model("llama"), way, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert input_device(model) == torch.device("cpu")
    before = model.config._attn_implementation
    hooks = {name: type(module._hf_hook) for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    for result in generate_many(model, asked, max_new_tokens=10, num_blocks=64, block_size=4):
        assert result.tokens == alone(reference, result.prompt_ids, max_new_tokens=10)
    sampled = generate_many(model, asked, max_new_tokens=6, do_sample=True, seed=3, num_blocks=64)
    torch.manual_seed(4)
    assert sampled[1].tokens == alone(reference, asked[1], max_new_tokens=6, do_sample=True)
    with paged_attention(model):
        ids = torch.tensor([asked[1]])
        output = generate(model, ids, cache=PagedCache(model.config, num_blocks=64))
        assert output.tolist() == generate(reference, ids).tolist()
    assert model.config._attn_implementation == before != IMPLEMENTATION
    assert hooks == {name: type(m._hf_hook) for name, m in model.named_modules() if hasattr(m, "_hf_hook")}
    assert alone(model, asked[0], max_new_tokens=10) == alone(reference, asked[0], max_new_tokens=10)


def test_blocks_are_where_their_layers_run(tmp_path: Path) -> None:
    model, pool = offload(build_model("llama"), "some layers on disk", tmp_path), BlockPool(num_blocks=16)
    with ContinuousBatcher(model, pool=pool) as batcher:
        batcher.submit([1, 2, 3], max_new_tokens=3).result()
    assert {storage.device for storage in pool.storages.values()} == {torch.device("cpu")}


def test_the_comparison_for_two_gpus_runs_on_one_cpu(tmp_path: Path) -> None:
    bench = Bench(Recorder(tmp_path, time.time() + 60), TOY_SIZES, torch.device("cpu"))
    result = compare_over(bench, [torch.device("cpu")] * 2)
    assert result.passed and result.values == {"equal_tokens": 1.0, "blocks_on": "cpu"}
    with pytest.raises(Skip, match="two GPUs"):
        compare_over_two_devices(bench)


def test_the_example(tiny_llama_folder: Path) -> None:
    script = ROOT / "examples" / "several_devices.py"
    if not script.parent.is_dir():  # the sdist has the tests without them; a checkout never skips
        pytest.skip("examples are not part of this distribution")
    command = [sys.executable, str(script), "--model", str(tiny_llama_folder), "--max-new-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Once upon a time" in done.stdout and "blocks on cpu" in done.stdout
