"""Packed linear weights: as exact, never stale, and nothing that a plain linear layer does is lost."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import build_model, forward, generate, random_prompts, tiny_model
from torch import nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode
from transformers import CompileConfig

from hf_paged import (
    PagedCache,
    disable_paged_attention,
    enable_paged_attention,
    pack_linears,
    packed_linears,
    paged_attention,
    unpack_linears,
)
from hf_paged.patches import linears
from hf_paged.patches.linears import PackedLinear, ShapeSpeed

ROWS = (1, 7, 16, 100)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or linears._multiply is None, reason="this build of torch has no oneDNN"
)


measure = linears._time


@pytest.fixture(autouse=True)
def timed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be measured does not matter here."""
    monkeypatch.setattr(linears, "_time", lambda pairs: {rows: (1.0, 1.0) for rows in linears.ROW_COUNTS})


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each packed multiplication that was made."""
    calls: list[int] = []
    multiply = linears._multiply

    def counted(input: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(input.numel() // input.shape[-1])
        return multiply(input, *args)

    monkeypatch.setattr(linears, "_multiply", counted)
    return calls


def net(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(48, 72, bias=bias), nn.ReLU(), nn.Linear(72, 48, bias=bias)).to(dtype).eval()


def packed_net(**options: Any) -> nn.Sequential:
    model = net(**options)
    assert pack_linears(model, min_speedup=0).packed == 2
    return model


def inputs(rows: int = 5, features: int = 48, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(rows)).to(dtype)


def is_right(model: nn.Module, input: torch.Tensor | None = None) -> bool:
    """Whether a net of two linears gives what their present weights mean."""
    input = inputs() if input is None else input
    with torch.no_grad():
        first, _, second = model
        expected = linear(linear(input, first.weight, first.bias).relu(), second.weight, second.bias)
        return torch.allclose(model(input), expected, rtol=1e-4, atol=1e-5)


def runs_packed(model: nn.Module, multiplied: list[int], input: torch.Tensor | None = None) -> int:
    """How many multiplications of one pass are by packed weights. The pass is checked, too."""
    multiplied.clear()
    assert is_right(model, input)
    return len(multiplied)


# What is multiplied ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_features, in_features", [(576, 192), (13, 5), (64, 1536)])
def test_errors_are_those_of_a_plain_float32_multiplication(
    out_features: int, in_features: int, bias: bool, multiplied: list[int]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(in_features, out_features, bias=bias)
    pack_linears(layer, min_speedup=0)
    for rows in ROWS:
        input = inputs(rows, in_features)
        exact = linear(input.double(), layer.weight.double(), layer.bias.double() if bias else None)
        multiplied.clear()
        with torch.no_grad():
            ours = (layer(input) - exact).abs().max()
        assert multiplied == [rows]
        plain = (linear(input, layer.weight, layer.bias) - exact).abs().max()
        assert ours <= 3 * plain + 1e-7, (rows, ours, plain)


def test_bfloat16_is_as_exact_as_plain(multiplied: list[int]) -> None:
    layer = nn.Linear(192, 64).to(torch.bfloat16)
    try:
        linears._reorder(layer.weight.detach())
    except RuntimeError:
        pytest.skip("this CPU has no bfloat16 for oneDNN")
    pack_linears(layer, min_speedup=0)
    input = inputs(16, 192, torch.bfloat16)
    exact = linear(input.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        assert (layer(input) - exact).abs().max() <= 2 * (linear(input, layer.weight, layer.bias) - exact).abs().max()
    assert multiplied == [16]


@pytest.mark.parametrize("shape", [(48,), (1, 48), (3, 2, 48), (2, 1, 3, 48), (0, 48)])
def test_any_shape_of_input(shape: tuple[int, ...]) -> None:
    model = packed_net()
    input = torch.randn(shape)
    assert model(input).shape == shape
    assert is_right(model, input)


def test_inputs_that_lie_in_other_ways(multiplied: list[int]) -> None:
    model = packed_net()
    wide = torch.randn(5, 100)
    for input in (torch.randn(48, 5).t(), wide[:, :48], wide[:, 1:97:2], torch.randn(1, 48).expand(5, 48)):
        assert runs_packed(model, multiplied, input) == 2


def test_wrong_inputs_get_the_errors_of_a_plain_layer() -> None:
    plain, packed = net(), packed_net()
    for wrong in (torch.randn(2, 47), torch.randn(2, 48).double(), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as expected:
            plain(wrong)
        with pytest.raises(RuntimeError) as found, torch.no_grad():
            packed(wrong)
        assert str(found.value) == str(expected.value)


# Where it is used ------------------------------------------------------------------------------------------------


def speed(*used_at: int) -> ShapeSpeed:
    ones = dict.fromkeys((1, 16, 64), 1.0)
    return ShapeSpeed(48, 48, "float32", 1, 1, ones, ones, used_at)


def test_row_counts_between_measured_ones_need_both() -> None:
    found = {used: [rows for rows in (1, 2, 16, 17, 64, 65, 999) if speed(*used).helps(rows)] for used in
             [(), (1,), (16,), (64,), (1, 16), (16, 64), (1, 16, 64)]}  # fmt: skip
    assert found == {
        (): [],
        (1,): [1],
        (16,): [16],
        (64,): [64, 65, 999],
        (1, 16): [1, 2, 16],
        (16, 64): [16, 17, 64, 65, 999],
        (1, 16, 64): [1, 2, 16, 17, 64, 65, 999],
    }


def test_only_row_counts_that_gain_are_multiplied_packed(
    monkeypatch: pytest.MonkeyPatch, multiplied: list[int]
) -> None:
    monkeypatch.setattr(linears, "_time", lambda pairs: {1: (1.0, 2.0), 16: (3.0, 2.0), 64: (1.2, 1.0)})
    model = net()
    report = pack_linears(model, min_speedup=1.3)
    assert report.packed == 2
    for shape in report.shapes:
        assert shape.used_at == (16,)
        assert shape.speedups == {1: 0.5, 16: 1.5, 64: 1.2}
    for rows, expected in ((1, 0), (8, 0), (16, 2), (32, 0), (64, 0)):
        assert runs_packed(model, multiplied, inputs(rows)) == expected, rows


def test_layers_that_gain_nothing_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_time", lambda pairs: {1: (1.0, 1.0), 16: (1.0, 1.0)})
    model = net()
    report = pack_linears(model)
    assert report.packed == report.extra_bytes == 0
    assert report.left == {"packing was not faster": 2}
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_the_report_says_what_was_done() -> None:
    model = nn.Sequential(net(), nn.Linear(48, 72), nn.Linear(8, 8).double())
    report = pack_linears(model, min_speedup=0)
    assert report.packed == 3
    assert report.left == {"float64": 1}
    assert report.extra_bytes >= 3 * 48 * 72 * 4
    assert {(s.out_features, s.in_features, s.layers, s.packed) for s in report.shapes} == {
        (72, 48, 2, 2),
        (48, 72, 1, 1),
    }
    for words in ("3 linear layers packed", "72 x 48 float32: 2 of 2 packed", "1 left as they are: float64"):
        assert words in repr(report)
    back = json.loads(json.dumps(report.as_dict()))
    assert back["packed"] == 3
    assert back["shapes"][0]["used_at"] == list(linears.ROW_COUNTS)


def test_measuring_times_both_ways_at_all_row_counts() -> None:
    weight = torch.randn(72, 48)
    found = measure([(weight, linears._reorder(weight))])
    assert tuple(found) == linears.ROW_COUNTS
    assert all(0 < seconds < 10 for pair in found.values() for seconds in pair)


def test_max_memory_is_kept() -> None:
    one = 48 * 72 * 4
    model = nn.Sequential(*(nn.Linear(48, 72, bias=False) for _ in range(3)))
    report = pack_linears(model, min_speedup=0, max_memory=2 * one + one // 2)
    assert report.packed == 2
    assert report.extra_bytes <= 2 * one + one // 2
    assert report.left == {"no room for a copy in max_memory": 1}
    assert pack_linears(model, min_speedup=0, max_memory=3 * one + one // 2).packed == 3
    assert pack_linears(net(), min_speedup=0, max_memory=one - 1).left == {"no room for a copy in max_memory": 2}
    for wrong in (0, 2.0, "much", True):
        with pytest.raises(ValueError, match="max_memory"):
            pack_linears(net(), max_memory=wrong)


# Changed weights -------------------------------------------------------------------------------------------------


@torch.no_grad()
def add(weight: torch.Tensor) -> None:
    weight[3, 3] += 1


def step(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1).step()


CHANGES = {
    "in place": add,
    "an optimizer": step,
    "under inference_mode": torch.inference_mode()(lambda weight: weight.mul_(2)),
    "init": nn.init.normal_,
    "a detached alias": lambda weight: weight.detach()[1:2].zero_(),
    ".data.add_": lambda weight: weight.data.add_(0.1),
    ".data.copy_": lambda weight: weight.data.copy_(torch.randn(weight.shape)),
    ".data =": lambda weight: setattr(weight, "data", torch.randn(weight.shape)),
    ".data = a part": lambda weight: setattr(weight, "data", weight.data[:10]),
    ".data = transposed": lambda weight: setattr(weight, "data", weight.data.t()),
    "numpy": lambda weight: weight.detach().numpy().fill(2.0),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_no_copy_of_a_weight_as_it_was_is_used(how: str, multiplied: list[int]) -> None:
    layer = nn.Linear(48, 48, bias=False)
    pack_linears(layer, min_speedup=0)
    input = inputs()
    with torch.no_grad():
        before = layer(input)
        assert multiplied
        multiplied.clear()
        CHANGES[how](layer.weight)
        after = layer(input)
        assert torch.equal(after, linear(input, layer.weight))
    assert not multiplied
    assert after.shape != before.shape or not torch.allclose(after, before)
    assert pack_linears(layer, min_speedup=0).packed == layer.weight.is_contiguous()
    with torch.no_grad():
        assert torch.allclose(layer(input), after, rtol=1e-4, atol=1e-4)


def test_packing_again_finds_an_edit_of_one_value_that_torch_did_not_count() -> None:
    model = packed_net()
    model[0].weight.data[1, 1] += 5
    assert pack_linears(model, min_speedup=0).packed == 2
    assert is_right(model)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict(assign: bool, multiplied: list[int]) -> None:
    model = packed_net()
    other = {name: tensor + 1 for name, tensor in net().state_dict().items()}
    model.load_state_dict(other, assign=assign)
    assert runs_packed(model, multiplied) == 0
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


def test_loading_one_layer_leaves_the_other_packed(multiplied: list[int]) -> None:
    model = packed_net()
    model.load_state_dict({"0.weight": torch.randn(72, 48)}, strict=False)
    assert runs_packed(model, multiplied) == 1


def test_a_new_parameter(multiplied: list[int]) -> None:
    model = packed_net()
    model[0].weight = nn.Parameter(torch.randn(72, 48))
    assert runs_packed(model, multiplied) == 1


def test_weights_that_share_memory_are_watched_alike(multiplied: list[int]) -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48))
    model[2].weight = model[0].weight
    report = pack_linears(model, min_speedup=0)
    assert report.packed == 2
    assert report.extra_bytes == linears._reorder(model[0].weight.detach()).nbytes  # one copy for both
    assert runs_packed(model, multiplied) == 2
    with torch.no_grad():
        model[2].weight.mul_(2)
    assert runs_packed(model, multiplied) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_makes_layers_plain(dtype: torch.dtype, multiplied: list[int]) -> None:
    model = packed_net().to(dtype)
    input = inputs(dtype=dtype)
    with torch.no_grad():
        assert torch.equal(model(input), net().to(dtype)(input))
    assert not multiplied
    pack_linears(model.float(), min_speedup=0)
    assert runs_packed(model, multiplied) == 2


def test_moving_nowhere_keeps_the_copies(multiplied: list[int]) -> None:
    model = packed_net().to("cpu").float().requires_grad_(False).train().eval()
    assert runs_packed(model, multiplied) == 2


def test_shared_memory(multiplied: list[int]) -> None:
    model = packed_net()
    model.share_memory()
    assert is_right(model)
    pack_linears(model, min_speedup=0)
    assert runs_packed(model, multiplied) == 2


def test_the_meta_device_and_back() -> None:
    model = packed_net()
    model.to("meta")
    assert model(torch.empty(2, 48, device="meta")).device.type == "meta"
    model.to_empty(device="cpu").load_state_dict(net().state_dict())
    assert is_right(model)


# Copies ----------------------------------------------------------------------------------------------------------


def reloaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), reloaded]
)
def test_copies_are_plain_and_right(copied: Any, multiplied: list[int]) -> None:
    model = packed_net()
    other = copied(model)
    if copied is not copy.copy:  # which shares the layers
        assert type(other[0]) is type(other[2]) is nn.Linear
        assert not any("hf_paged" in name for name in vars(other[0]))
        assert runs_packed(other, multiplied) == 0
    assert runs_packed(model, multiplied) == 2
    assert type(copied(model[0])) is nn.Linear


def test_state_dicts_and_parameters_are_as_before() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    pack_linears(model, min_speedup=0)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(dict(model.named_buffers())) == []


def test_save_pretrained(tmp_path: Path) -> None:
    model = build_model("llama")
    pack_linears(model, min_speedup=0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert type(loaded.lm_head) is nn.Linear
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


# Gradients, and others who look on -------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["weight", "bias", "input"])
def test_gradients_are_those_of_a_plain_layer(trained: str, multiplied: list[int]) -> None:
    plain, packed = net(), packed_net()
    found = []
    for model in (plain, packed):
        model.requires_grad_(False)
        input = inputs()
        of = input if trained == "input" else getattr(model[0], trained)
        of.requires_grad_()
        model[0](input).square().sum().backward()
        found.append(of.grad)
    assert torch.equal(*found)
    assert not multiplied


def test_training_goes_on_from_a_packed_model(multiplied: list[int]) -> None:
    plain, packed = net(), packed_net()
    for model in (plain, packed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs()).square().mean().backward()
            optimizer.step()
    assert not multiplied
    assert runs_packed(packed, multiplied) == 0
    assert torch.equal(plain[0].weight, packed[0].weight)


def test_frozen_weights_are_multiplied_packed_with_gradients_enabled(multiplied: list[int]) -> None:
    packed_net().requires_grad_(False)(inputs())
    assert len(multiplied) == 2


@torch.no_grad()
def test_autocast(multiplied: list[int]) -> None:
    plain, packed = net(), packed_net()
    with torch.autocast("cpu", torch.bfloat16):
        found = packed(inputs())
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, plain(inputs()))
    assert not multiplied


@torch.no_grad()
def test_function_transforms(multiplied: list[int]) -> None:
    plain, packed = net(), packed_net()
    batch = torch.randn(3, 5, 48)
    tangent = torch.ones(5, 48)
    for one, other in (
        (torch.vmap(packed)(batch), torch.vmap(plain)(batch)),
        (torch.func.jvp(packed, (batch[0],), (tangent,)), torch.func.jvp(plain, (batch[0],), (tangent,))),
        (dual_tangent(packed, batch[0], tangent), dual_tangent(plain, batch[0], tangent)),
    ):
        torch.testing.assert_close(one, other)
    assert not multiplied


def dual_tangent(model: nn.Module, input: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input, tangent)
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


@torch.no_grad()
def test_tracing_counting_and_exporting_see_a_plain_layer() -> None:
    plain, packed = net(), packed_net()
    counts = []
    for model in (plain, packed):
        with FlopCounterMode(display=False) as counter:
            model(inputs())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    traced = torch.jit.trace(packed, inputs())
    assert "mkldnn" not in str(traced.inlined_graph)
    exported = torch.export.export(packed, (inputs(),))
    assert "hf_paged" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(inputs()), plain(inputs()))


@pytest.mark.parametrize(
    "packed_under, run_under", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
def test_packing_under_one_mode_and_running_under_another(
    packed_under: Any, run_under: Any, multiplied: list[int]
) -> None:
    with packed_under():
        model = packed_net() if packed_under is torch.no_grad else net()
    if packed_under is torch.inference_mode:
        assert pack_linears(model).packed == 0  # torch counts no writes to these
        model = net()
        with torch.inference_mode():
            pack_linears(model, min_speedup=0)
    with run_under():
        model(inputs())
    assert len(multiplied) == 2


# Graphs ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_compiled_layers_are_packed_in_one_graph_and_never_stale(multiplied: list[int]) -> None:
    model = packed_net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs()), net()(inputs()))
    assert len(multiplied) == 2
    multiplied.clear()
    model[0].weight.data.mul_(2)
    torch.testing.assert_close(compiled(inputs()), torch.nn.Sequential(*model)(inputs()))
    assert len(multiplied) == 2  # the other layer, compiled and not
    multiplied.clear()
    unpack_linears(model)
    torch.testing.assert_close(compiled(inputs()), model(inputs()))
    assert not multiplied


def test_compiled_training_is_plain(multiplied: list[int]) -> None:
    plain, packed = net(), packed_net()
    for model in (plain, torch.compile(packed, backend="aot_eager", fullgraph=True)):
        model(inputs()).square().mean().backward()
    torch.testing.assert_close(packed[0].weight.grad, plain[0].weight.grad)
    assert not multiplied


# Who is left alone -----------------------------------------------------------------------------------------------


def test_layers_of_other_kinds_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    patched = nn.Linear(8, 8)
    patched.forward = lambda input: input
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.ModuleList([Other(8, 8), patched, normed, nn.Linear(8, 8, device="meta"), nn.Linear(8, 8).double()])
    kinds = [type(layer) for layer in model]
    report = pack_linears(model, min_speedup=0)
    assert report.packed == 0
    assert sum(report.left.values()) == 5
    assert [type(layer) for layer in model] == kinds
    assert torch.equal(patched(inputs(2, 8)), inputs(2, 8))


def test_float16_is_left_alone_where_the_cpu_has_none() -> None:
    model = net(torch.float16)
    report = pack_linears(model, min_speedup=0)
    assert report.packed in (0, 2)
    if report.packed == 0:
        assert report.left == {"oneDNN has no packed form for float16 on this CPU": 2}
        assert type(model[0]) is nn.Linear


def test_gpt2_is_packed_where_it_has_linears() -> None:
    report = pack_linears(build_model("gpt2"), min_speedup=0)
    assert report.packed == 1  # the LM head
    assert any("Conv1D" in reason for reason in report.left)


def test_offloaded_layers_are_left_alone() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = net()
    expected = model(inputs()).detach()
    accelerate.cpu_offload(model)
    assert pack_linears(model, min_speedup=0).packed == 0
    torch.testing.assert_close(model(inputs()), expected)


def test_offloading_a_packed_model_is_right() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = packed_net()
    accelerate.cpu_offload(model)
    expected = net()(inputs())
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(inputs()), expected)
    unpack_linears(model)
    torch.testing.assert_close(model(inputs()), expected)


def test_a_parametrization_on_a_packed_layer(multiplied: list[int]) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = packed_net()[0]
    with torch.no_grad():
        expected = linear(inputs(), 2 * layer.weight, layer.bias)
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
        torch.testing.assert_close(layer(inputs()), expected)
        unpack_linears(layer)
        torch.testing.assert_close(layer(inputs()), expected)
    assert not multiplied


def test_peft_models_are_refused_and_merged_ones_packed(multiplied: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build_model("llama"), config)
    for adapted in (model, model.get_base_model()):
        with pytest.raises(NotImplementedError, match="merge_and_unload"):
            pack_linears(adapted)
        assert not linears.has_packed_linears(model)
    ids, _ = random_prompts((9, 9))
    with torch.no_grad():
        expected = model(ids).logits
        merged = model.merge_and_unload()
        pack_linears(merged, min_speedup=0)
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-3, atol=1e-3)
    assert len(multiplied) == sum(isinstance(module, nn.Linear) for module in merged.modules())


def test_an_adapter_on_a_packed_model_may_be_merged() -> None:
    peft = pytest.importorskip("peft")
    model = build_model("llama")
    pack_linears(model, min_speedup=0)
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    ids = torch.tensor([[5]])  # one row: what is written through .data must be seen there, too
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not str"):
        pack_linears("model")
    with pytest.raises(ValueError, match="min_speedup"):
        pack_linears(net(), min_speedup=-1)


# Over and back ---------------------------------------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    return [(type(module), sorted(vars(module)), list(map(id, module.parameters()))) for module in model.modules()]


def test_unpacking_restores_everything() -> None:
    model = net()
    before = state(model)
    unpack_linears(model)
    assert state(model) == before
    pack_linears(model, min_speedup=0)
    assert [type(layer) for layer in model] == [PackedLinear, nn.ReLU, PackedLinear]
    assert unpack_linears(model) is model
    assert state(model) == before
    unpack_linears(model)
    assert state(model) == before


def test_packing_twice_makes_no_second_copy(monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    model = net()
    first = pack_linears(model, min_speedup=0)
    copies = [vars(layer)[linears._PACKED].tensor for layer in (model[0], model[2])]
    monkeypatch.setattr(linears, "_reorder", lambda weight: pytest.fail("packed again"))
    second = pack_linears(model, min_speedup=0)
    assert (second.packed, second.extra_bytes) == (first.packed, first.extra_bytes)
    assert {shape.speedups[1] for shape in second.shapes} == {shape.speedups[1] for shape in first.shapes}
    assert all(
        vars(layer)[linears._PACKED].tensor is tensor
        for layer, tensor in zip((model[0], model[2]), copies, strict=True)
    )
    assert runs_packed(model, multiplied) == 2


def test_the_context_manager_undoes_after_an_exception() -> None:
    model = net()
    before = state(model)
    with pytest.raises(KeyboardInterrupt), packed_linears(model, min_speedup=0) as report:
        assert report.packed == 2
        assert type(model[0]) is PackedLinear
        raise KeyboardInterrupt
    assert state(model) == before
    pack_linears(model, min_speedup=0)
    with packed_linears(model, min_speedup=0):
        pass
    assert type(model[0]) is PackedLinear


def test_nothing_is_changed_when_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = state(model)
    reorder, calls = linears._reorder, []

    def fail(weight: torch.Tensor) -> torch.Tensor:
        calls.append(weight)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return reorder(weight)

    monkeypatch.setattr(linears, "_reorder", fail)
    with pytest.raises(KeyboardInterrupt):
        pack_linears(model, min_speedup=0)
    assert state(model) == before


# With generate() -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
def test_generate_gives_the_same_tokens(paged: bool, multiplied: list[int]) -> None:
    model = build_model("llama")
    ids, mask = random_prompts((3, 17, 9))
    expected = generate(tiny_model("llama"), ids, mask)
    pack_linears(model, min_speedup=0)
    if paged:
        enable_paged_attention(model)
    assert torch.equal(generate(model, ids, mask, PagedCache(model.config) if paged else None), expected)
    assert len(multiplied) == 12 * sum(isinstance(module, nn.Linear) for module in model.modules())


def test_compiled_decode_steps_are_packed(multiplied: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("llama")
    ids, mask = random_prompts((3, 17, 9))
    expected = generate(tiny_model("llama"), ids, mask)
    pack_linears(model, min_speedup=0)
    enable_paged_attention(model, compile=True)
    config = CompileConfig(backend="eager", mode="default", fullgraph=True)
    found = generate(model, ids, mask, PagedCache(model.config), compile_config=config)
    assert torch.equal(found, expected)
    assert not [record for record in caplog.records if record.name == "hf_paged"]  # why steps were not compiled
    assert len(multiplied) == 12 * sum(isinstance(module, nn.Linear) for module in model.modules())


def test_disable_unpacks() -> None:
    model = build_model("llama")
    before = state(model)
    enable_paged_attention(model)
    pack_linears(model, min_speedup=0)
    assert state(model) != before
    disable_paged_attention(model)
    assert state(model) == before
    pack_linears(model, min_speedup=0)
    disable_paged_attention(model)  # which was not enabled
    assert state(model) == before


def test_the_block_of_paged_attention_undoes_what_was_packed_within() -> None:
    model = build_model("llama")
    before = state(model)
    with paged_attention(model):
        pack_linears(model, min_speedup=0)
    assert state(model) == before
    pack_linears(model, min_speedup=0)
    packed = state(model)
    with paged_attention(model):
        pass
    assert state(model) == packed


def test_a_deep_copy_of_an_enabled_packed_model(multiplied: list[int]) -> None:
    model = build_model("llama")
    enable_paged_attention(model)
    pack_linears(model, min_speedup=0)
    other = copy.deepcopy(model)
    assert not linears.has_packed_linears(other)
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            forward(other, ids, PagedCache(other.config)).logits, forward(model, ids, PagedCache(model.config)).logits
        )
