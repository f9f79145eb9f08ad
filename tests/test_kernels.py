"""Every backend against attention computed in float64 from the dense keys and values that were written."""

import ctypes
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from kernel_checks import PROMPTS, Setup, assert_close, check_decode, check_prefill, prompt_options
from torch.nn import functional as F

from hf_paged.kernels import reference
from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

try:
    from hf_paged.kernels import cpu, cpu_threads
except ImportError:  # numba is optional
    cpu = None

try:
    from hf_paged.kernels import gpu  # in the interpreter
except ImportError:
    gpu = None

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(cpu, id="cpu", marks=pytest.mark.skipif(cpu is None, reason="needs numba")),
]
EVERY_BACKEND = [
    *BACKENDS,
    pytest.param(gpu, id="triton", marks=pytest.mark.skipif(gpu is None, reason="needs Triton")),
]
LENGTHS = [1, 0, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 300]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_decode_at_every_block_border(backend, dtype, block_size):
    check_decode(backend, Setup(LENGTHS, block_size=block_size, dtype=dtype).fill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (4, 1), (12, 2), (14, 2), (64, 1)])
def test_decode_with_any_number_of_query_heads_in_a_group(backend, heads, kv_heads):
    check_decode(backend, Setup([5, 40, 0, 290], heads=heads, kv_heads=kv_heads).fill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "key_dim, value_dim",
    [*((dim, dim) for dim in (8, 24, 64, 72, 80, 96, 112, 128, 256)), (192, 128), (17, 33)],
)
def test_decode_with_any_head_dim(backend, dtype, key_dim, value_dim):
    setup = Setup([1, 16, 0, 270], key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    check_decode(backend, setup.fill(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 33, 1000])
@pytest.mark.parametrize("names", ["", "sinks", "alibi_slopes", "sinks alibi_slopes"])
def test_decode_options(backend, softcap, window, names):
    setup = Setup([1, 0, 16, 33, 600], heads=6, kv_heads=2).fill(backend)
    check_decode(backend, setup, softcap=softcap, window=window, **prompt_options(names))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_long_row_is_split_and_joined(backend, with_sinks):
    setup = Setup([5000], heads=8, kv_heads=2)
    setup.key[:, :, 2500] *= 6  # the largest score lies in the middle
    check_decode(backend, setup.fill(backend), sinks=torch.linspace(-3, 9, 8) if with_sinks else None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_stores_nothing_gives_zeros(backend):
    setup = Setup([20, 20]).fill(backend)
    query = setup.random(2, 4, 1, 64)
    out = backend.decode(query, setup.storage, setup.plan([[-1], [19]]), scale=0.1)
    assert (out[0] == 0).all()
    assert_close(out[1], setup.expected(1, query[1], [19], 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_as_good_as_torch(backend, dtype):
    setup = Setup([400] * 4, heads=8, kv_heads=2, dtype=dtype).fill(backend)
    query = setup.random(4, 8, 1, 64)
    out = backend.decode(query, setup.storage, setup.decode_plan(), scale=0.125)[:, 0]
    torchs = F.scaled_dot_product_attention(query, setup.key, setup.value, scale=0.125, enable_gqa=True)[:, :, 0]
    exact = torch.stack([setup.expected(row, query[row], [399], 0.125)[0] for row in range(4)])
    ours, theirs = (out.double() - exact).abs(), (torchs.double() - exact).abs()
    assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()
    assert ours.max() <= 1.5 * max(theirs.max(), torch.finfo(dtype).eps * exact.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_extremes_are_widened_exactly(backend):
    """One stored token: its value comes out as it went in, subnormals, infinities and NaN too."""
    special = torch.tensor([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, math.inf, -math.inf, math.nan] + [1.0] * 7)
    for dtype in (torch.float16, torch.bfloat16):
        setup = Setup([1], heads=1, kv_heads=1, key_dim=16, dtype=dtype)
        setup.value[0, 0, 0] = special.to(dtype)
        setup.fill(backend)
        out = backend.decode(setup.random(1, 1, 1, 16), setup.storage, setup.decode_plan(), scale=0.1)
        torch.testing.assert_close(out[0, 0, 0], special.to(dtype), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_nan_of_the_model_is_not_hidden(backend):
    setup = Setup([300, 300])
    setup.key[0, 0, 7] = math.nan
    setup.fill(backend)
    out = backend.decode(setup.random(2, 4, 1, 64), setup.storage, setup.decode_plan(), scale=0.1)
    assert out[0, 0, :2].isnan().all()
    assert not out[0, 0, 2:].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_large_scores_do_not_overflow(backend):
    setup = Setup([700], heads=2, kv_heads=1)
    setup.key *= 100
    setup.fill(backend)
    query = setup.random(1, 2, 1, 64) * 100
    out = backend.decode(query, setup.storage, setup.decode_plan(), scale=1.0)
    best = (query[0, :, 0].double() @ setup.key[0, 0].double().T).argmax(-1)
    torch.testing.assert_close(out[0, 0], setup.value[0, 0, best])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [40, 24])
def test_write_touches_its_slots_and_no_other(backend, dtype, value_dim):
    setup = Setup([20, 3, 0, 33], key_dim=40, value_dim=value_dim, dtype=dtype)
    before = setup.storage.key_blocks.clone(), setup.storage.value_blocks.clone()
    positions = torch.full((4, 5), -1)
    positions[0] = torch.tensor([15, 16, -1, -1, 17])
    positions[1] = torch.tensor([-1, -1, 0, 1, 2])
    positions[3] = torch.tensor([-1, -1, -1, -1, 32])
    fused = setup.random(4, 5, 2 * (40 + value_dim))  # strided slices of a fused projection, as in GPT-2
    key = fused[..., :80].view(4, 5, 2, 40).transpose(1, 2)
    value = fused[..., 80:].view(4, 5, 2, value_dim).transpose(1, 2)
    backend.write(setup.storage, key, value, setup.plan(positions))
    for row in range(4):
        for i, position in enumerate(positions[row].tolist()):
            if position >= 0:
                block, slot = setup.table[row, position // 16], position % 16
                before[0][block, :, slot] = key[row, :, i]
                before[1][block, :, slot] = value[row, :, i]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(setup.storage.key_blocks.contiguous().view(bits), before[0].view(bits))
    assert torch.equal(setup.storage.value_blocks.contiguous().view(bits), before[1].view(bits))


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_any_strides(backend):
    """Also a last dimension that is not contiguous, and blocks in another layout."""
    setup = Setup([20, 37])
    setup.storage.key_blocks, setup.storage.value_blocks = (
        torch.full((8, 16, 2, 64), math.nan).transpose(1, 2) for _ in range(2)
    )
    setup.key, setup.value = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (setup.key, setup.value))
    setup.fill(backend)
    query = setup.random(2, 64, 1, 4).permute(0, 3, 2, 1)
    out = backend.decode(query, setup.storage, setup.decode_plan(), scale=0.1)
    for row in range(2):
        assert_close(out[row], setup.expected(row, query[row], [setup.lengths[row] - 1], 0.1))


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("value_dim", [64, 32])
def test_copy_blocks(backend, value_dim):
    setup = Setup([40, 40], value_dim=value_dim).fill(backend)
    key, value = setup.storage.key_blocks.clone(), setup.storage.value_blocks.clone()
    backend.copy_blocks(setup.storage, [])
    backend.copy_blocks(setup.storage, [(1, 5), (0, 7), (1, 6)])
    key[[5, 7, 6]], value[[5, 7, 6]] = key[[1, 0, 1]], value[[1, 0, 1]]
    torch.testing.assert_close(setup.storage.key_blocks, key, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(setup.storage.value_blocks, value, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "options", ["", "window", "softcap", "sinks", "alibi_slopes", "window softcap sinks alibi_slopes"]
)
def test_prefill(backend, prompt, options):
    lengths, positions = PROMPTS[prompt]
    positions = torch.tensor([list(row) for row in positions])
    check_prefill(backend, Setup(lengths, heads=6), positions, prompt_options(options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key_dim, value_dim", [(72, 72), (192, 128), (24, 40)])
@pytest.mark.parametrize("prompt", ["all new", "past"])
def test_prefill_head_dims(backend, prompt, key_dim, value_dim):
    lengths, positions = PROMPTS[prompt]
    check_prefill(backend, Setup(lengths, key_dim=key_dim, value_dim=value_dim), torch.tensor(positions), {})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made_in, used_in", [(a, b) for a in (False, True) for b in (False, True)])
def test_inference_mode_and_gradients(backend, made_in, used_in):
    with torch.inference_mode(made_in):
        setup = Setup([20, 33])
    positions = torch.tensor([[19], [32]])
    with torch.inference_mode(used_in):
        query = setup.random(2, 4, 1, 64).requires_grad_(not used_in)
        key = setup.random(2, 2, 1, 64).requires_grad_(not used_in)
        setup.fill(backend, [19, 32])
        plan = setup.plan(positions)
        backend.write(setup.storage, key, key, plan)
        outs = [
            backend.decode(query, setup.storage, plan, scale=0.1),
            backend.prefill(query, key, key, setup.storage, plan, scale=0.1),
        ]
    assert not any(out.requires_grad for out in outs)
    assert not setup.storage.key_blocks.requires_grad
    torch.testing.assert_close(*outs)


def test_reference_serves_other_dtypes():
    setup = Setup([20, 3], dtype=torch.float64).fill(reference)
    query = setup.random(2, 4, 1, 64)
    out = reference.decode(query, setup.storage, setup.decode_plan(), scale=0.1)
    torch.testing.assert_close(out[0], setup.expected(0, query[0], [19], 0.1), rtol=1e-12, atol=1e-12)


# What only the compiled kernels promise -------------------------------------------------------------------------------

needs_cpu = pytest.mark.skipif(cpu is None, reason="needs numba")


@needs_cpu
def test_cpu_names_what_it_does_not_serve():
    def storage(key_dtype, value_dtype, device="cpu"):
        return LayerStorage(2, 16, 1, 8, 8, key_dtype, value_dtype, torch.device(device))

    assert "float64" in cpu.unsupported(torch.float64, storage(torch.float64, torch.float64))
    assert "bfloat16" in cpu.unsupported(torch.float32, storage(torch.float32, torch.bfloat16))
    assert "bfloat16" in cpu.unsupported(torch.bfloat16, storage(torch.float32, torch.float32))
    assert "meta" in cpu.unsupported(torch.float32, storage(torch.float32, torch.float32, "meta"))


@needs_cpu
def test_a_row_is_the_same_in_any_batch_and_with_any_number_of_threads():
    setup = Setup([2000, 700, 31], heads=8, kv_heads=2).fill(cpu)
    query = setup.random(3, 8, 1, 64)
    together = cpu.decode(query, setup.storage, setup.decode_plan(), scale=0.1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for row in range(3):
                length = setup.lengths[row]
                lens, positions = (torch.tensor(x, dtype=torch.int32) for x in ([length], [[length - 1]]))
                plan = GroupPlan(setup.table[row : row + 1].contiguous(), lens, positions, length)
                alone = cpu.decode(query[row : row + 1], setup.storage, plan, scale=0.1)
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)


@needs_cpu
@pytest.mark.parametrize("fork", ["torch", "python"])
def test_several_threads_at_once(fork, monkeypatch):
    if fork == "python":  # what serves where torch has no OpenMP runtime of the kind we can call
        callback = cpu_threads._FORK_TYPE(cpu_threads._fork_python_threads)
        monkeypatch.setattr(cpu, "FORK", ctypes.cast(callback, ctypes.c_void_p).value)
    setups = [Setup([900 + 10 * i, 40], heads=8, kv_heads=2, seed=i).fill(cpu) for i in range(4)]
    queries = [setup.random(2, 8, 1, 64) for setup in setups]
    expected = [
        reference.decode(query, setup.storage, setup.decode_plan(), scale=0.1)
        for query, setup in zip(queries, setups, strict=True)
    ]
    failures = []

    def work(i):
        for _ in range(25):
            out = cpu.decode(queries[i], setups[i].storage, setups[i].decode_plan(), scale=0.1)
            if not torch.allclose(out, expected[i], rtol=1e-5, atol=2e-6):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_cpu
def test_compiled_code_is_loaded_by_the_next_process(tmp_path):
    code = """
import torch
from hf_paged.kernels import cpu, cpu_compiled
from hf_paged.storage import LayerStorage
from hf_paged.plan import GroupPlan
storage = LayerStorage(2, 16, 1, 8, 8, torch.float32, torch.float32, torch.device("cpu"))
one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
plan = GroupPlan(zero, one, zero, 1)
x = torch.ones(1, 1, 1, 8)
cpu.write(storage, x, x, plan)
assert torch.equal(cpu.decode(x, storage, plan, scale=1.0)[0], x[0])
print(sum(sum(f.stats.cache_misses.values()) for f in (cpu_compiled.start_decode, cpu_compiled.start_write)),
      sum(worker._cache_hits for worker in cpu_compiled.KEPT))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == runs[1].returncode == 0, runs[0].stderr + runs[1].stderr
    assert runs[1].stdout.split() == ["0", "2"]
