"""How many requests fit: the arithmetic, and the figures of models against what a PagedCache of them really takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import blocks_for, forward
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, LlamaConfig, MambaConfig, PreTrainedConfig

from hf_paged import PagedCache
from hf_paged.capacity import (
    Footprint,
    GroupFootprint,
    LengthsError,
    MemoryBudget,
    footprint_of,
    format_size,
    load_config,
    parse_size,
    plan_capacity,
    probe,
    read_lengths,
)
from hf_paged.models import ModelLoadError, load_model

GB, GIB = 10**9, 2**30
SHAPE = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "llama": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "gemma2": {"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 8},
    "gpt_oss": {
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 8},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "gemma3_text": {"num_hidden_layers": 6, "num_key_value_heads": 1, "sliding_window": 8},
    "gemma3n_text": {
        **{"num_hidden_layers": 6, "num_key_value_heads": 2, "sliding_window": 8, "num_kv_shared_layers": 2},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199, "laurel_rank": 8},
        **{"intermediate_size": 96, "activation_sparsity_pattern": None},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "deepseek_v3": {
        **{"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16, "head_dim": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32},
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    },
    "qwen3_next": {
        **{"num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "falcon_h1": {
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4},
        **{"mamba_d_head": 16, "mamba_d_state": 16},
    },
}


def tiny_config(kind: str) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **(SHAPE | ENDS | CONFIGS[kind]))


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return tiny_config(request.param)


def test_a_model_is_counted_as_a_cache_that_it_fills(config: PreTrainedConfig) -> None:
    """Layer by layer, with the states of recurrent layers, which are no part of the pool."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = PagedCache(config, block_size=4, num_blocks=8)
    with torch.no_grad():
        for tokens in (7, 1):
            forward(model, torch.randint(1, 199, (1, tokens)), cache)
    footprint = footprint_of(config, torch.float32)
    pool = cache.pool
    assert [group.bytes_per_token * 4 for group in footprint.groups] == [
        pool.bytes_per_block(group) for group in range(len(pool.groups))
    ]
    assert [group.name for group in footprint.groups] == [group.name for group in pool.groups]
    assert footprint.pool_bytes(8, 4) == pool.reserved_bytes
    states = 0
    for layer in cache._state_layers():
        for by_index in (getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}):
            states += sum(t.nbytes for t in by_index.values() if t is not None)
    assert footprint.state_bytes == states
    assert footprint.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.smoke
def test_figures_are_those_of_the_formulas() -> None:
    llama = footprint_of(tiny_config("llama"), torch.bfloat16)
    assert llama.bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert llama.weight_bytes == pytest.approx(2 * llama.parameters, abs=1000)  # and a buffer for positions
    latent = footprint_of(tiny_config("deepseek_v3"), torch.bfloat16)
    assert latent.bytes_per_token == 2 * (24 + 8) * 2
    shared = footprint_of(tiny_config("gemma3n_text"), torch.float32)
    assert shared.num_layers == 4  # of six, two read the keys of others
    hybrid = footprint_of(tiny_config("qwen3_next"), torch.float32)
    assert hybrid.num_layers == 1 and hybrid.state_bytes > 0
    assert hybrid.token_bytes(100) - hybrid.token_bytes(99) == hybrid.bytes_per_token


@pytest.mark.parametrize("length", [3, 8, 9, 30, 61])
def test_blocks_are_those_that_a_windowed_model_holds(length: int) -> None:
    """A model that is fed token by token: its peak, its tensors, and what idles in them."""
    config = tiny_config("gemma3_text")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = PagedCache(config, block_size=4, num_blocks=16)
    held = [0] * len(cache.pool.groups)
    with torch.no_grad():
        for _ in range(length):
            forward(model, torch.ones(1, 1, dtype=torch.long), cache)
            held = [max(was, len(rows[0])) for was, rows in zip(held, cache.block_tables.values(), strict=True)]
    fit = plan_capacity(footprint_of(config, torch.float32), length=length, max_length=100, block_size=4).blocks
    assert fit.blocks == max(held)
    per_block = [cache.pool.bytes_per_block(group) for group in range(len(held))]
    assert fit.bytes_per_request == max(held) * sum(per_block)
    assert fit.idle_window_bytes == sum((max(held) - n) * b for n, b in zip(held, per_block, strict=True))


def test_peaks_are_the_most_that_any_length_on_the_way_holds() -> None:
    for window in (None, 1, 5, 8, 100):
        group = GroupFootprint("sliding_attention" if window else "full_attention", window, 1, 1)
        most = 0
        for length in range(1, 70):
            most = max(most, blocks_for([length], 8, window))
            assert group.peak_blocks(length, 8) == most, (window, length)


def test_the_sketch_of_the_idea_holds() -> None:
    """40 GB, 250 KB a token: 20 requests or so if each reserves 8,192 tokens, and 50 of 500 tokens take 6.25 GB."""
    footprint = Footprint.per_token(parse_size("250KB"))
    plan = plan_capacity(footprint, parse_size("40GB"), length=500, max_length=8192, requests=50)
    assert plan.contiguous.requests == 19 and plan.contiguous.ratio == pytest.approx(19.5, abs=0.1)
    assert plan.contiguous.waste > 0.93
    tokens, blocks, contiguous = plan.requests_bytes
    assert tokens == 6.25 * GB
    assert blocks == 50 * 32 * 16 * 250_000 == pytest.approx(6.25 * GB, rel=0.03)
    assert contiguous > 40 * GB
    assert plan.blocks.requests == 312 and plan.blocks.waste_bytes == 12 * 250_000
    assert plan_capacity(footprint, length=500, block_size=4, requests=50).requests_bytes[1] == 6.25 * GB


def test_a_pool_of_the_planned_blocks_keeps_to_the_budget() -> None:
    config = tiny_config("qwen3_next")
    footprint = footprint_of(config, torch.float32)
    plan = plan_capacity(footprint, 10_000_000, length=90, max_length=200)
    needed = plan.blocks.requests * footprint.state_bytes
    assert footprint.pool_bytes(plan.num_blocks, 16) + needed <= 10_000_000
    assert plan.num_blocks >= plan.blocks.requests * plan.blocks.blocks


def test_layers_of_unequal_size_are_told_of() -> None:
    uneven = Footprint(
        (GroupFootprint("sliding_attention", 8, 1, 100), GroupFootprint("full_attention", None, 1, 300)),
        first_layer_bytes=100,
    )
    plan = plan_capacity(uneven, 10**6, length=50, max_length=100)
    assert plan.max_memory_bytes == pytest.approx(2 * 10**6, rel=0.01)
    assert any("100% more than it is told" in note for note in plan.notes)
    assert uneven.pool_bytes(plan.num_blocks, 16) <= 10**6


def test_larger_blocks_waste_more() -> None:
    plan = plan_capacity(Footprint.per_token(1000), GB, length=512)
    assert plan.blocks.waste == 0  # of just this length
    wastes = [fit.waste_bytes for fit in plan.block_sizes]
    assert wastes == [pytest.approx(1000 * (size - 1) / 2, abs=1) for size in (16, 32, 64, 128, 256)]
    fits = [fit.requests for fit in plan.block_sizes]
    assert fits == sorted(fits, reverse=True) and fits[0] > fits[-1]


def test_real_lengths_give_an_average_and_a_worst_case() -> None:
    footprint = Footprint.per_token(1)
    prompts, outputs = [16, 16], [16, 160]
    lengths = plan_capacity(footprint, 1760, max_length=100, lengths=(prompts, outputs), length=10).lengths
    # Answers that grow hold 2 blocks for 16 steps, and 2 to 11 for 16 steps each.
    assert lengths.running_bytes == pytest.approx(16 * (2 * 16 + sum(range(2, 12)) * 16) / (16 + 160))
    assert lengths.ended_bytes == 16 * (2 + 11) / 2
    assert (lengths.running, lengths.ended, lengths.worst) == (int(1760 / lengths.running_bytes), 16, 10)
    assert lengths.too_long == 1 and lengths.total.max == 176 and lengths.total.mean == 104


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_what_growing_answers_hold_is_summed_without_a_table_of_lengths(window: int | None) -> None:
    group = GroupFootprint("sliding_attention" if window else "full_attention", window, 1, 1)
    footprint = Footprint((group,))
    lengths = np.arange(1, 100)
    expected = np.cumsum(footprint.pool_blocks(lengths, 8))
    assert footprint.summed_blocks(lengths, 8).tolist() == expected.tolist()
    longest = 2**31 - 10  # whose lengths would not fit into memory
    found = plan_capacity(footprint, 10**12, max_length=2**31 - 1, lengths=([longest] * 3, [9] * 3)).lengths
    assert found.running_bytes == found.longest_bytes > 0


def test_a_request_longer_than_the_model_is_told_of() -> None:
    footprint = Footprint((GroupFootprint("full_attention", None, 1, 1),), max_positions=512)
    assert any("512 tokens as the longest" in note for note in plan_capacity(footprint, length=513).notes)
    assert not plan_capacity(footprint, length=512).notes


def test_the_block_size_that_is_asked_for_is_among_those_that_are_compared() -> None:
    sizes = [fit.block_size for fit in plan_capacity(Footprint.per_token(1), block_size=8).block_sizes]
    assert sizes == [8, 16, 32, 64, 128, 256]


def test_a_plan_is_json() -> None:
    plan = plan_capacity(
        footprint_of(tiny_config("gemma3_text")), MemoryBudget.of_gpu(GIB, 100, 200), lengths=([3, 4], [5, 6])
    )
    found = json.loads(json.dumps(plan.as_dict()))
    assert found["budget"]["kv_bytes"] == GIB - 300
    assert found["blocks"]["requests"] == plan.blocks.requests and found["lengths"]["worst"] == plan.lengths.worst
    assert found["model"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("40GB", 40 * GB), ("40 gb", 40 * GB), ("80GiB", 80 * GIB), ("250KB", 250_000), ("1.5KiB", 1536)),
        *(("12", 12), ("12B", 12), ("0", 0), ("2TB", 2 * 10**12)),
    ],
)
def test_sizes_are_decimal_or_binary_as_typed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["80G", "much", "-1GB", "", "1e9", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_sizes_are_shown_in_either_kind() -> None:
    assert [format_size(6.25 * GB, binary) for binary in (False, True)] == ["6.25 GB", "5.82 GiB"]
    assert [format_size(n) for n in (12, 64 * 2**20, 999 * GIB)] == ["12 B", "64.0 MiB", "999 GiB"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 100, "max_length": 50}, "does not fit"),
        ({"length": 0}, "length must be positive"),
        ({"requests": 0}, "requests must be positive"),
        ({"block_size": 12}, "power of two"),
        ({"lengths": ([1, 2], [3])}, "as many of both"),
        ({"lengths": ([], [])}, "and some"),
        ({"lengths": ([-1], [3])}, "negative"),
        ({"length": 10**20, "max_length": 10**20}, "length must be at most 2,147,483,647"),
        ({"max_length": 2**31}, "max_length must be at most"),
        ({"lengths": ([10**11], [3])}, "one of the lengths is 100,000,000,000"),
        ({"lengths": ([1], [10**30])}, "one of the lengths is"),
    ],
)
def test_what_makes_no_plan_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_capacity(Footprint.per_token(1), **arguments)


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing"):
        MemoryBudget.of_gpu(100, 90, 10)


def test_models_that_cannot_be_counted_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="mamba has no attention layers"):
        footprint_of(MambaConfig())
    with pytest.raises(NotImplementedError, match="bart has an encoder"):
        footprint_of(BartConfig())


def test_constants_that_a_model_looks_at_are_no_obstacle() -> None:
    config = tiny_config("gemma3n_text")
    config.activation_sparsity_pattern = [0.95] * config.num_hidden_layers
    assert footprint_of(config).bytes_per_token == footprint_of(tiny_config("gemma3n_text")).bytes_per_token


def test_where_the_whole_does_not_run_the_text_part_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a model wants images or a library that is not here; its weights are then unknown."""
    text = tiny_config("gemma3_text")
    whole = AutoConfig.for_model("gemma3", text_config=text.to_dict())
    build = probe._build

    def only_text(config: PreTrainedConfig, dtype: torch.dtype) -> object:
        if config.model_type == "gemma3":
            raise ImportError("a library is not here")
        return build(config, dtype)

    known = footprint_of(whole)
    monkeypatch.setattr(probe, "_build", only_text)
    found = footprint_of(whole)
    assert known.groups == found.groups == footprint_of(text).groups
    assert known.parameters > 0 and found.parameters is found.weight_bytes is None


def test_the_config_is_left_as_it_is() -> None:
    config = tiny_config("llama")
    before = config.to_dict(), config._attn_implementation
    footprint_of(config)
    assert (config.to_dict(), config._attn_implementation) == before


def test_configs_come_from_files_and_folders(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        found = load_config(place)
        assert isinstance(found, LlamaConfig) and found.num_hidden_layers == 3
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name, message in (("none.json", "no such file"), ("other.json", "model_type")):
        with pytest.raises(ModelLoadError, match=message):
            load_config(tmp_path / name)
    (tmp_path / "new.json").write_text('{"model_type": "not-yet"}')
    with pytest.raises(ModelLoadError, match="not-yet"):
        load_config(tmp_path / "new.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"the folder holds no config\.json"):
        load_config(tmp_path / "empty")


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": "many"},
        {"num_hidden_layers": 1.5},
        {"num_attention_heads": 7, "hidden_size": 64},
        {"max_position_embeddings": None},
    ],
)
def test_a_config_that_its_class_does_not_allow_is_told_of(tmp_path: Path, values: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | values))
    for place in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ModelLoadError, match=next(iter(values)).replace("num_attention_heads", "attention.heads")):
            load_config(place)
    with pytest.raises(ModelLoadError, match="Cannot load the model"):
        load_model(tmp_path)


ROWS = [{"prompt": "a b c", "prompt_tokens": 3, "ids": [1, 2]}, {"prompt": "d", "prompt_tokens": 1, "ids": [3]}]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_lengths_are_read_from_numbers_ids_and_texts(rows: Path) -> None:
    assert read_lengths(rows, "prompt_tokens", "ids") == ([3, 1], [2, 1])
    words = read_lengths(rows, "prompt", "ids", count_tokens=lambda texts: [len(text.split()) for text in texts])
    assert words == ([3, 1], [2, 1])
    table = rows.with_suffix(".csv")
    table.write_text("p,o\n5,6\n7,8\n")
    assert read_lengths(table, "p", "o") == ([5, 7], [6, 8])


def test_columns_that_give_no_lengths_are_named(rows: Path) -> None:
    with pytest.raises(LengthsError, match=r"no column 'answer'; its columns are .*prompt_tokens"):
        read_lengths(rows, "prompt", "answer")
    with pytest.raises(LengthsError, match="holds texts: say with --tokenizer"):
        read_lengths(rows, "prompt", "ids")
    broken = rows.with_name("broken.jsonl")
    broken.write_text("{")
    with pytest.raises(LengthsError, match=r"Cannot read broken\.jsonl"):
        read_lengths(broken, "a", "b")


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.csv", ""), ("a.csv", "prompt,output\n")]
)
def test_a_file_without_requests_is_told_of(tmp_path: Path, name: str, text: str) -> None:
    pytest.importorskip("datasets")
    (tmp_path / name).write_text(text)
    with pytest.raises(LengthsError, match="it holds no requests"):
        read_lengths(tmp_path / name, "prompt", "output")


def test_names_of_files_are_no_patterns(rows: Path) -> None:
    place = rows.rename(rows.with_name("[r]o*s?.jsonl"))
    rows.with_name("rows.jsonl").write_text('{"prompt_tokens": 9, "ids": [1]}')
    assert read_lengths(place, "prompt_tokens", "ids") == ([3, 1], [2, 1])


def test_what_is_raised_is_not_logged_beside(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    datasets = pytest.importorskip("datasets")
    before = datasets.logging.get_verbosity()
    (tmp_path / "bad.parquet").write_text("nonsense")
    with pytest.raises(LengthsError, match=r"Cannot read bad\.parquet"):
        read_lengths(tmp_path / "bad.parquet", "a", "b")
    assert capfd.readouterr() == ("", "")
    assert datasets.logging.get_verbosity() == before


def test_without_datasets_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LengthsError, match="pip install datasets"):
        read_lengths(path, "a", "b")
    with pytest.raises(LengthsError, match="must end in"):
        read_lengths(tmp_path / "rows.txt", "a", "b")
    with pytest.raises(LengthsError, match="no such file"):
        read_lengths(tmp_path / "none.jsonl", "a", "b")


def test_arrays_and_numbers_agree() -> None:
    footprint = footprint_of(tiny_config("gemma3_text"))
    lengths = np.arange(1, 50)
    assert footprint.pool_blocks(lengths, 4).tolist() == [footprint.pool_blocks(int(n), 4) for n in lengths]
    assert footprint.token_bytes(lengths).tolist() == [footprint.token_bytes(int(n)) for n in lengths]
