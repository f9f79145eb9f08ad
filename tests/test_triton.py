"""The Triton kernels in Triton's interpreter, in float16 and float32, against float64.

bfloat16 is left to GPUs: its products are wrong in the interpreter.
"""

import itertools
import math
import os
import random

import pytest
import torch
from allpairspy import AllPairs
from kernel_checks import PROMPTS, Setup, assert_close, check_decode, check_prefill, prompt_options

from hf_paged import PagedCache, paged_attention, use_backend
from hf_paged.kernels import reference
from hf_paged.kernels.select import backend_for
from hf_paged.plan import GroupPlan, send_together
from hf_paged.storage import LayerStorage

pytest.importorskip("triton")
from hf_paged.kernels import gpu, triton_launch
from hf_paged.kernels.triton_config import Config, Target, decode_config, num_splits, parts, prefill_config

# Scores of nothing but -inf divide by zero in numpy, where a GPU returns the infinity that is masked.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.float16]
DIMS = [(dim, dim) for dim in (16, 24, 64, 72, 80, 96, 112, 128, 192, 256)] + [(192, 128)]
WINDOWS = [None, 1, 17, 1000]
CASES = {
    "dtype": DTYPES,
    "dims": DIMS,
    "group": [1, 3, 4, 8, 64],
    "block_size": [16, 32, 64, 256],
    "tile": [16, 32, 64],
    "splits": [1, 3, 9],  # the longest row has five blocks at most
    "q_len": [1, 2, 5, 16],
    "window": WINDOWS,
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "alibi": [False, True],
}


def pairs(**cases):
    """Few cases in which every value of one parameter meets every value of each other."""

    def is_small(values):
        case = dict(zip(cases, values, strict=False))  # it is asked about beginnings, too
        return case.get("group", 1) * case.get("q_len", 1) <= 128

    chosen = [dict(zip(cases, values, strict=True)) for values in AllPairs(list(cases.values()), filter_func=is_small)]
    return [pytest.param(case, id=" ".join(f"{name}={value}" for name, value in case.items())) for case in chosen]


def check(case):
    """One decode, of one token a row or of several behind a past, of which some are padding."""
    lengths = [1, 0, 15, 17, 33, 70]
    q_len, group, (key_dim, value_dim) = case["q_len"], case["group"], case["dims"]
    setup = Setup(lengths, 2 * group, 2, key_dim, value_dim, case["block_size"], case["dtype"])
    heads = torch.linspace(0, 1, 2 * group)
    options = {"softcap": case["softcap"], "window": case["window"]}
    options |= {"sinks": 5 * heads - 2 if case["sinks"] else None, "alibi_slopes": heads if case["alibi"] else None}
    m = min(64, max(16, 1 << (group * q_len - 1).bit_length()))
    cut = {"config": Config(m, case["tile"], 4, 2), "splits": case["splits"]}
    if q_len == 1:
        check_decode(gpu, setup.fill(gpu), cut, **options)
        return
    positions = torch.stack([torch.arange(length - q_len, length) for length in lengths])
    positions = positions.masked_fill(positions < 0, -1)  # rows shorter than the step are padded on the left
    check_prefill(Decode(), setup, positions, options, cut)


class Decode:
    """The backend with its decode kernel for prefill, so that a test can say how it is cut."""

    name, write = gpu.name, staticmethod(gpu.write)

    def prefill(self, query, key, value, storage, plan, **options):
        return gpu.decode(query, storage, plan, **options)


@pytest.mark.parametrize("case", pairs(**CASES))
def test_decode(case):
    check(case)


@pytest.mark.slow
def test_decode_the_whole_product():
    """Every combination, or a share of them: `HF_PAGED_PRODUCT=3/2000` runs the fourth of 2,000 shares, 250 cases."""
    share, shares = map(int, os.environ.get("HF_PAGED_PRODUCT", "0/2000").split("/"))
    combinations = list(itertools.product(*CASES.values()))
    random.Random(0).shuffle(combinations)
    for values in combinations[share::shares]:
        case = dict(zip(CASES, values, strict=True))
        print(case)  # pytest shows the last one if it fails
        check(case)


PREFILLS = {
    "prompt": [name for name in PROMPTS if name != "many behind a past"],
    "dims": [(16, 16), (72, 72), (96, 96), (112, 112), (128, 128), (192, 128)],
    "dtype": DTYPES,
    "block_size": [16, 64],
    "tile": [16, 32],
    "m": [16, 32, 64],
    "options": ["", "window", "softcap sinks", "alibi_slopes", "window softcap sinks alibi_slopes"],
    "heads": [(6, 2), (6, 6)],
}


@pytest.mark.parametrize("case", pairs(**PREFILLS))
def test_prefill(case):
    lengths, positions = PROMPTS[case["prompt"]]
    positions = torch.tensor([list(row) for row in positions])
    setup = Setup(lengths, *case["heads"], *case["dims"], case["block_size"], case["dtype"])
    cut = {"config": Config(case["m"], case["tile"], 4, 2)}
    check_prefill(gpu, setup, positions, prompt_options(case["options"]), cut)


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_rules_cut_it(device, dtype, monkeypatch):
    monkeypatch.setattr(gpu, "target_of", lambda device_: Target(device, 8))
    setup = Setup([300, 5], heads=8, dtype=dtype)
    check_decode(gpu, setup.fill(gpu))
    positions = torch.tensor([list(range(260, 300)), [-1] * 35 + list(range(5))])
    check_prefill(gpu, Setup([300, 5], heads=8, dtype=dtype), positions, {})


def test_a_nan_of_the_model_is_not_hidden():
    setup = Setup([100, 100])
    setup.key[0, 0, 7] = math.nan
    setup.fill(gpu)
    for splits in (1, 4):
        query = setup.random(2, 4, 1, 64)
        out = gpu.decode(query, setup.storage, setup.decode_plan(), scale=0.1, splits=splits)
        assert out[0, 0, :2].isnan().all()
        assert not out[0, 0, 2:].isnan().any() and not out[1].isnan().any()


def test_large_scores_do_not_overflow():
    setup = Setup([150], heads=2, kv_heads=1)
    setup.key *= 100
    setup.fill(gpu)
    query = setup.random(1, 2, 1, 64) * 100
    best = (query[0, :, 0].double() @ setup.key[0, 0].double().T).argmax(-1)
    for splits in (1, 3):
        out = gpu.decode(query, setup.storage, setup.decode_plan(), scale=1.0, splits=splits)
        torch.testing.assert_close(out[0, 0], setup.value[0, 0, best])


def test_a_pool_of_more_than_two_to_the_31_elements():
    """Its memory is committed by the system where it is touched: at the end of the pool alone."""
    num_blocks, kv_heads, dim = 2**31 // (2 * 2 * 16 * 64) + 9, 2, 64
    storage = LayerStorage(num_blocks, 16, kv_heads, dim, dim, torch.float16, torch.float16, torch.device("cpu"))
    assert storage.kv[:-4].numel() > 2**31
    setup = Setup([20], dtype=torch.float16)
    setup.storage, setup.table = storage, torch.tensor([[num_blocks - 2, num_blocks - 3]], dtype=torch.int32)
    setup.fill(gpu)
    check_decode(gpu, setup)
    positions = torch.arange(20)[None]
    query = setup.random(1, 4, 20, dim)
    out = gpu.prefill(query, None, None, storage, setup.plan(positions), scale=0.1, config=Config(16, 16, 4, 2))
    assert_close(out[0], setup.expected(0, query[0], positions[0], 0.1), rounds_weights=True)
    gpu.copy_blocks(storage, [(num_blocks - 2, num_blocks - 1)])
    torch.testing.assert_close(storage.kv[num_blocks - 1], storage.kv[num_blocks - 2], rtol=0, atol=0)


def test_fixed_chunks_do_not_depend_on_the_batch():
    setup = Setup([300, 20, 900, 131], heads=8).fill(gpu)
    query = setup.random(4, 8, 1, 64)

    def decode(rows):
        lengths = [setup.lengths[row] for row in rows]
        positions = torch.tensor([[length - 1] for length in lengths], dtype=torch.int32)
        plan = GroupPlan(setup.table[rows], torch.tensor(lengths, dtype=torch.int32), positions, max(lengths))
        return gpu.decode(query[rows], setup.storage, plan, scale=0.1)

    with gpu.fixed_chunks(128):
        together = decode([0, 1, 2, 3])
        for row in range(4):
            assert torch.equal(decode([row])[0], together[row])
        assert torch.equal(decode([3, 1])[0], together[3])
    assert_close(together[2], setup.expected(2, query[2], [899], 0.1), rounds_weights=True)
    assert not torch.equal(decode([0])[0], together[0])  # otherwise cut, another order of additions


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("window", [100, 300])
def test_fixed_chunks_under_a_window(q_len, window):
    setup = Setup([700, 20, 333], heads=8).fill(gpu)
    query = setup.random(3, 8, q_len, 64)
    positions = torch.stack([torch.arange(length - q_len, length) for length in setup.lengths])
    with gpu.fixed_chunks(128):
        out = gpu.decode(query, setup.storage, setup.plan(positions), scale=0.1, window=window)
    for row in range(3):
        expected = setup.expected(row, query[row], positions[row], 0.1, window=window)
        assert_close(out[row], expected, rounds_weights=True)


def test_a_chunk_that_another_thread_changes_meanwhile(monkeypatch):
    """What is compiled for one chunk is not kept for another."""
    setup = Setup([600], heads=8).fill(gpu)
    query = setup.random(1, 8, 1, 64)
    make = gpu._Decoder

    def make_and_leave(*args):
        monkeypatch.setattr(gpu, "_chunk", 0)
        return make(*args)

    monkeypatch.setattr(gpu, "_Decoder", make_and_leave)
    monkeypatch.setattr(gpu, "_chunk", 128)
    for _ in range(2):
        out = gpu.decode(query, setup.storage, setup.decode_plan(), scale=0.1)
        assert_close(out[0], setup.expected(0, query[0], [599], 0.1), rounds_weights=True)


@pytest.mark.parametrize("window", [None, 16])
def test_a_sink_of_minus_infinity_takes_nothing(window):
    options = {"sinks": torch.tensor([-math.inf, 0.0, -math.inf, 1.0, 2.0, -math.inf]), "window": window}
    positions = torch.arange(40)[None]
    check_prefill(gpu, Setup([40], heads=6), positions, options, {"config": Config(16, 16, 4, 2)})
    check_decode(gpu, Setup([60], heads=6).fill(gpu), {"splits": 3}, **options)


def test_heads_that_lie_more_than_two_to_the_31_elements_apart():
    """Heads before tokens, as `torch.cat` over parts of a head dim leaves them, in a long prompt."""
    heads, tokens, dim, apart = 3, 20, 16, 2**30 + 16
    memory = torch.empty(2 * apart + tokens * dim, dtype=torch.float16)  # committed where it is touched
    far = torch.as_strided(memory, (1, heads, tokens, dim), (0, apart, dim, 1))
    setup = Setup([tokens], heads=heads, kv_heads=heads, key_dim=dim, dtype=torch.float16)
    positions = torch.arange(tokens)[None]
    far.copy_(setup.key)
    gpu.write(setup.storage, far, far, setup.plan(positions))
    assert torch.equal(reference.gather(setup.storage, setup.table[0], tokens)[1], setup.key[0])
    setup.fill(gpu)
    query = setup.random(1, heads, tokens, dim)
    far.copy_(query)
    for out in (
        gpu.prefill(far, None, None, setup.storage, setup.plan(positions), scale=0.1, config=Config(16, 16, 4, 2)),
        gpu.decode(far[:, :, :9], setup.storage, setup.plan(positions[:, :9].contiguous(), [9]), scale=0.1),
    ):
        expected = setup.expected(0, query[0, :, : out.shape[1]], positions[0, : out.shape[1]], 0.1)
        assert_close(out[0], expected, rounds_weights=True)


@pytest.mark.parametrize("tokens", [0, 64, 200])
def test_a_chunk_that_cannot_be_is_refused(tokens):
    with pytest.raises(ValueError, match="power of two"), gpu.fixed_chunks(tokens):
        pass


@pytest.mark.parametrize("text, words", [("100", "power of two"), ("0", "power of two"), ("many", "no number")])
def test_a_chunk_of_the_environment_that_cannot_be_is_refused(monkeypatch, text, words):
    monkeypatch.setenv("HF_PAGED_DECODE_CHUNK", text)
    with pytest.raises(ValueError, match=words):
        gpu._chunk_of_environment()
    monkeypatch.setenv("HF_PAGED_DECODE_CHUNK", "512")
    assert gpu._chunk_of_environment() == 512


class Compiled:
    """Stands for what Triton compiled: keeps what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Function:
    """Stands for a kernel with two arguments and one constant."""

    arg_names = ("x", "stride", "WIDTH")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled()

        return launch


def test_what_was_compiled_is_launched_again_under_its_key(monkeypatch):
    monkeypatch.setattr(triton_launch.knobs.runtime, "interpret", False)
    function = Function()
    launcher = triton_launch.Launcher(function, {"WIDTH": 64, "UNUSED": 1}, torch.device("cpu"), num_warps=2)
    for key, stride in (("a", 16), ("a", 32), ("b", 8), ("a", 48)):
        launcher(key, (4, 1, 1), "x", stride)
    options = {"num_warps": 2, "enable_fp_fusion": True}
    assert function.compiled == [((4, 1, 1), ("x", 16, 64), options), ((4, 1, 1), ("x", 8, 64), options)]
    assert launcher._compiled["a"].launches == [((4, 1, 1), ("x", 32, 64)), ((4, 1, 1), ("x", 48, 64))]
    assert launcher._compiled["b"].launches == []


def test_a_launch_that_differs_in_alignment_is_another():
    tensor = torch.zeros(64, dtype=torch.float16)
    assert gpu._addresses(tensor, None, tensor[8:]) == 0
    assert gpu._addresses(tensor, tensor[1:]) != gpu._addresses(tensor[1:], tensor)


def test_launches_that_triton_tells_apart_have_other_keys():
    kinds = [gpu._kinds((n,)) for n in (16, 1, 2, 2**31, 2**31 + 1)]
    assert len(set(kinds)) == len(kinds)
    assert gpu._kinds((16, 48)) == gpu._kinds((32, 0)) and gpu._kinds((7,)) == gpu._kinds((9,))


@pytest.mark.parametrize("on_hip", [False, True])
def test_launches_of_one_key_are_one_to_triton(monkeypatch, on_hip):
    """By what Triton itself would tell apart, of launches that differ in strides, addresses and sizes of memory."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    backend = HIPBackend if on_hip else CUDABackend
    exempt = {"q_len", "table_row", "splits"}  # as the kernels' decorators say
    monkeypatch.setattr(gpu, "IS_HIP", on_hip)
    launches = {}

    def record(launcher, key, grid, *arguments):
        function = launcher._function
        told = tuple(
            native_specialize_impl(backend, value, False, name not in exempt, True)
            for name, value in zip(function.arg_names, arguments, strict=False)
        )
        launches.setdefault((id(launcher), key), set()).add(told)

    monkeypatch.setattr(triton_launch.Launcher, "__call__", record)
    setup = Setup([40, 33], heads=8, dtype=torch.float16)
    positions = torch.stack([torch.arange(n - 20, n) for n in setup.lengths])
    memory = torch.empty(2**30 + 2**20, dtype=torch.float16)  # over 2 GiB, committed where it is touched
    small = torch.empty(2**20, dtype=torch.float16)
    for pool, start, (row, head, token) in itertools.product(
        (small, memory), (0, 8, 3), ((20 * 512, 64, 512), (10240, 1280, 64), (10250, 1281, 64), (10240, 72, 576))
    ):

        def shaped(rows, heads, tokens, pool=pool, start=start, strides=(row, head, token)):
            return torch.as_strided(pool, (rows, heads, tokens, 64), (*strides, 1), start)

        gpu.write(setup.storage, shaped(2, 2, 20), shaped(2, 2, 20), setup.plan(positions))
        for window, sinks in ((None, None), (16, None), (1, torch.zeros(8)), (7, torch.zeros(9)[1:])):
            options = {"scale": 0.1, "window": window, "sinks": sinks}
            gpu.prefill(shaped(2, 8, 20), None, None, setup.storage, setup.plan(positions), **options)
            for splits in (1, 3):
                plan = setup.plan(positions[:, -1:].contiguous())
                gpu.decode(shaped(2, 8, 1), setup.storage, plan, splits=splits, **options)
    assert len(launches) > 40
    assert all(len(told) == 1 for told in launches.values())


def test_an_old_gpu_goes_the_dense_way(monkeypatch):
    monkeypatch.setattr(gpu, "target_of", lambda device: Target("sm_75", 40))
    assert "compute capability 8.0" in gpu.unsupported(torch.float32, Setup([5]).storage)


def test_a_plan_is_sent_in_one_piece():
    tensors = [
        torch.arange(n, dtype=torch.int32).view(shape)
        for n, shape in ((6, (2, 3)), (2, (2,)), (0, (0, 4)), (5, (5, 1)))
    ]
    sent = send_together(tensors, torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(sent, tensors, strict=True))
    assert all(tensor.storage_offset() % 4 == 0 and tensor.is_contiguous() for tensor in sent)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1


@pytest.mark.parametrize(
    "dim, expected",
    [(16, (16, 0)), (24, (32, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (112, (64, 64)),
     (128, (128, 0)), (192, (128, 64)), (256, (256, 0))],
)  # fmt: skip
def test_head_dims_are_cut_into_two_powers_of_two(dim, expected):
    assert parts(dim, 2, Target("sm_90", 132)) == expected
    first, second = parts(dim, 4, Target("gfx942", 304))
    assert first + second >= dim and max(first, second) <= 128 and (second == 0 or second >= 32)


def test_tiles_and_blocks_divide_one_another():
    for target in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"):
        for dim in (16, 72, 128, 256):
            for itemsize in (2, 4):
                configs = [decode_config(Target(target, 100), dim, dim, itemsize, queries) for queries in (1, 8, 1024)]
                for config in (*configs, prefill_config(Target(target, 100), dim, dim, itemsize)):
                    assert config.tile in (16, 32, 64, 128) and config.m in (16, 32, 64, 128)


def test_splits_fill_the_device_and_no_more():
    h100 = Target("sm_90", 132)
    assert num_splits(h100, 1, 8, 32768, 64) == 33
    assert num_splits(h100, 1, 1, 1 << 20, 64) == 64  # joining costs, too
    assert num_splits(h100, 8, 8, 4096, 64) == 5
    assert num_splits(h100, 256, 8, 4096, 64) == 1
    assert num_splits(h100, 1, 8, 100, 64) == 1
    assert num_splits(h100, 1, 8, 513, 64) == 3


@pytest.mark.parametrize(
    "change, words",
    [
        ({"block_size": 8}, "blocks of 16"),
        ({"key_dim": 8}, "head dims"),
        ({"key_dim": 260}, "head dims"),
        ({"key_dim": 20}, "head dims"),
        ({"dtype": torch.float64}, "float16"),
    ],
)
def test_what_it_cannot_serve_it_says(change, words):
    setup = Setup([5], **change)
    assert words in gpu.unsupported(setup.dtype, setup.storage)
    assert "one dtype" in gpu.unsupported(torch.bfloat16, Setup([5]).storage)


@pytest.mark.smoke
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(tiny_llama, beams):
    ids = torch.randint(1, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = tiny_llama.generate(input_ids=ids, attention_mask=mask, **options)
    with use_backend("triton"), paged_attention(tiny_llama):
        cache = PagedCache(tiny_llama.config, num_blocks=64)
        tokens = tiny_llama.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
    assert {layer.backend.name for layer in cache.layers} == {"triton"}
    assert torch.equal(tokens, expected)


def test_small_blocks_go_the_dense_way_on_a_gpu():
    setup = Setup([5], block_size=8)
    backend = backend_for(torch.device("cuda"), torch.float32, setup.storage)
    assert "blocks of 16" in backend.unsupported(torch.float32, setup.storage)
    setup.fill(backend)
    assert torch.equal(reference.gather(setup.storage, setup.table[0], 5)[0], setup.key[0])
    assert backend_for(torch.device("cuda"), torch.float32, Setup([5]).storage) is gpu
    assert backend_for(torch.device("cpu"), torch.float32, Setup([5]).storage) is not gpu
