"""Decode steps that generate() compiles: the tokens of eager decoding, in one graph that serves all lengths."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    CACHE_ARGUMENT,
    PAD,
    assert_unchanged,
    build_model,
    check_books,
    compiled_quickly,
    forward,
    generate,
    generate_dynamic,
    random_prompts,
    same_tokens,
    snapshot,
    tiny_model,
)
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.masking_utils import create_masks_for_generate

from hf_paged import (
    BlockPool,
    OutOfBlocksError,
    PagedCache,
    disable_paged_attention,
    enable_paged_attention,
    paged_attention,
    use_backend,
)
from hf_paged.patches.compiled import EAGER_BECAUSE
from hf_paged.rows import Rows
from hf_paged.step_cache import MAX_QUERIES, MIN_WIDTH, StepCache

FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "gpt_oss")
RAGGED = (3, 17, 9)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    """An enabled model that compiles in a second, all in one graph, or not at all."""
    model = build_model("llama")
    with paged_attention(model, compile=True), compiled_quickly(model):
        yield model
    assert not counters["graph_break"]


def compiled(model: PreTrainedModel, lengths: Any = RAGGED, cache: PagedCache | None = None, **options: Any) -> Any:
    """Tokens of an enabled model, which are DynamicCache's, too."""
    ids, mask = random_prompts(lengths)
    cache = PagedCache(model.config) if cache is None else cache
    got = generate(model, ids, mask, cache, **options)
    check_books(cache)
    want = generate_dynamic(model, ids, mask, **options)
    if options.get("return_dict_in_generate"):
        got, want = got.sequences, want.sequences
    same_tokens(model, got, want, mask)
    return got


# One graph ------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_gives_the_tokens_of_the_ordinary_cache(family: str) -> None:
    model = build_model(family)
    pool = BlockPool(block_size=2)
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=40)
    with paged_attention(model, compile=True), compiled_quickly(model):
        got = generate(model, ids, mask, PagedCache(model.config, pool=pool), max_new_tokens=40)
        assert graphs() == 1
        # Other lengths, a new cache on the pool, rows longer than the first block table; and a pool of another size.
        for lengths, cache in (
            ((20, 2, 31), PagedCache(model.config, pool=pool)),
            ((5, 5, 5), PagedCache(model.config, pool=pool)),
            (RAGGED, PagedCache(model.config, block_size=2, num_blocks=177)),
        ):
            others, other_mask = random_prompts(lengths, seed=5)
            generate(model, others, other_mask, cache, max_new_tokens=40)
        assert graphs() == 1
        generate(model, ids[:2], mask[:2], PagedCache(model.config, pool=pool))
        assert graphs() == 2, "a new batch size is one new graph"
        assert EAGER_BECAUSE not in vars(model)
    assert not counters["graph_break"]
    same_tokens(model, got, expected, mask)
    assert (int(mask.sum(1).max()) + 40) // 2 > MIN_WIDTH, "the block table had to be widened"


def test_torch_reports_no_recompilation(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    torch._logging.set_logs(recompiles=True)
    try:
        with caplog.at_level(logging.DEBUG):
            logger = logging.getLogger("torch._dynamo.guards")
            logger.addHandler(caplog.handler)
            compiled(llama, max_new_tokens=40)
            compiled(llama, (11, 2, 6), max_new_tokens=9)
            assert "Recompiling" not in caplog.text
            compiled(llama, return_dict_in_generate=True, output_hidden_states=True)
            assert "Recompiling" in caplog.text, "this test would not see one"
    finally:
        logger.removeHandler(caplog.handler)
        torch._logging.set_logs()


def test_compilation_keeps_no_cache_alive(llama: PreTrainedModel) -> None:
    """What is left of it in reference cycles may be frames, which hold their callers'."""

    def leave_a_cycle(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        left = (lambda: inspect.currentframe())()  # noqa: F841  # which refers to this frame
        gc.collect()  # so that it is old: torch collects what is young
        return module.forward

    ids, mask = random_prompts(RAGGED)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        cache = PagedCache(llama.config)
        llama.generation_config.compile_config = CompileConfig(fullgraph=True, backend=leave_a_cycle, mode=None)
        generate(llama, ids, mask, cache)
        alive = weakref.ref(cache)
        del cache
        assert graphs() == 1 and alive() is None
    finally:
        if collecting:
            gc.enable()


def test_batch_sizes_beyond_the_limit_decode_eagerly(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    other = build_model("llama", seed=1)
    with caplog.at_level(logging.WARNING, "hf_paged"), torch._dynamo.config.patch(recompile_limit=2):
        for model in (llama, other):
            with paged_attention(model, compile=True), compiled_quickly(model):
                for rows in (1, 2, 3, 4, 1):
                    compiled(model, [4 + row for row in range(rows)], max_new_tokens=4)
    assert graphs() == 2 * 2
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert [
        text.startswith("LlamaForCausalLM decodes without torch.compile: it has been compiled for 2") for text in said
    ] == [True, True]


def test_a_copy_of_a_model_has_graphs_of_its_own(llama: PreTrainedModel) -> None:
    compiled(llama)
    twin = copy.deepcopy(llama)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    compiled(twin)
    assert graphs() == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_triton_kernels_in_a_graph() -> None:
    model = build_model("gemma2")
    with use_backend("triton"), paged_attention(model, compile=True), compiled_quickly(model):
        cache = PagedCache(model.config)
        compiled(model, cache=cache, max_new_tokens=6)
    assert {layer.backend.name for layer in cache.layers} == {"triton"}
    assert graphs() == 1


def test_under_inference_mode(llama: PreTrainedModel) -> None:
    with torch.inference_mode():
        compiled(llama)
        compiled(llama, (6, 30, 2))
    assert graphs() == 1


@pytest.mark.parametrize("layers", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_real_model_by_inductor(smollm2: tuple[PreTrainedModel, Any], layers: int) -> None:
    """Its first layers, since all take half a minute."""
    model, tokenizer = copy.deepcopy(smollm2[0]), smollm2[1]
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    tokenizer.padding_side = "left"
    inputs = tokenizer(
        ["The capital of France is", "One, two, three, four, five, six,"], return_tensors="pt", padding=True
    )
    arguments = (inputs.input_ids, inputs.attention_mask)
    expected = generate_dynamic(model, *arguments, max_new_tokens=24)
    with paged_attention(model, compile=True):
        config = CompileConfig(fullgraph=True, mode="default")
        got = generate(model, *arguments, PagedCache(model.config), max_new_tokens=24, compile_config=config)
        assert EAGER_BECAUSE not in vars(model)
    assert graphs() == 1
    same_tokens(model, got, expected, inputs.attention_mask)


# All that generate() does with it -------------------------------------------------------------------------------------


def test_rows_that_end_make_no_new_graph(llama: PreTrainedModel) -> None:
    plain = compiled(llama, max_new_tokens=30)
    ends = [int(plain[0, 22]), int(plain[1, 30])]
    got = compiled(llama, max_new_tokens=30, eos_token_id=ends)
    assert (got[:, 17:] == PAD).any()
    assert graphs() == 1


def test_several_sequences(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts((4, 11))
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20}
    torch.manual_seed(3)
    got = generate(llama, ids, mask, PagedCache(llama.config), **options)
    assert graphs() == 1
    torch.manual_seed(3)
    assert torch.equal(got, generate_dynamic(llama, ids, mask, **options))


def test_second_turns_of_ragged_rows(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(llama.config)
    first = generate(llama, ids, mask, cache, max_new_tokens=10)
    more, more_mask = random_prompts((2, 7, 5), seed=9)
    turn = torch.cat((first, more), dim=1)
    turn_mask = torch.cat((mask, torch.ones(3, 10, dtype=torch.long), more_mask), dim=1)
    got = generate(llama, turn, turn_mask, cache, max_new_tokens=10)
    assert graphs() == 1
    assert torch.equal(got, generate_dynamic(llama, turn, turn_mask, max_new_tokens=10))
    check_books(cache)


def test_prompts_that_are_kept(llama: PreTrainedModel) -> None:
    pool = BlockPool(block_size=4, prefix_cache=True)
    for chunk in (None, 2):  # which compiles the rest of a prompt, whose beginning no layer has stored
        for _ in range(2):
            compiled(llama, cache=PagedCache(llama.config, pool=pool), prefill_chunk_size=chunk)
    assert graphs() <= 3


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drafting_makes_few_graphs(llama: PreTrainedModel, backend: str) -> None:
    assistant = tiny_model("llama", seed=3)
    with use_backend(backend):
        for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 4}):
            for lengths in ((9,), (30,), (14,)):
                compiled(llama, lengths, max_new_tokens=30, **options)
    assert graphs() <= 3, "one for a token, two for more"
    compiles = "get_compiled_call" in inspect.getsource(GenerationMixin._assisted_decoding)  # 5.17 does not
    assert bool(graphs()) == compiles


def test_prompts_in_chunks(llama: PreTrainedModel) -> None:
    for lengths in ((40, 35, 20), (60, 64, 7), (33, 1, 1)):
        compiled(llama, lengths, prefill_chunk_size=10)
    assert graphs() <= 3


def test_long_chunks_are_left_to_eager_kernels(llama: PreTrainedModel) -> None:
    compiled(llama, (90, 100, 40), prefill_chunk_size=MAX_QUERIES + 4, max_new_tokens=4)
    assert graphs() <= 2


def test_beams_decode_eagerly(llama: PreTrainedModel) -> None:
    compiled(llama, num_beams=3)
    assert graphs() == 0


def test_hidden_states_are_returned(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    want = generate_dynamic(llama, ids, mask, **options)
    cache = PagedCache(llama.config)
    got = generate(llama, ids, mask, cache, **options)
    assert got[CACHE_ARGUMENT] is cache
    for step, expected in zip(got.hidden_states[1:], want.hidden_states[1:], strict=True):
        torch.testing.assert_close(step[-1], expected[-1], atol=1e-4, rtol=1e-3)
    assert graphs() == 1


def test_attention_weights_are_computed_eagerly(llama: PreTrainedModel) -> None:
    options = {"return_dict_in_generate": True, "output_attentions": True}
    ids, mask = random_prompts((6, 6, 6))
    got = generate(llama, ids, mask, PagedCache(llama.config), **options)
    assert graphs() == 0
    assert got.attentions[3][0].shape == (3, 4, 1, 9)


# Which steps ----------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_on_a_cpu_unless_asked_for() -> None:
    model = build_model("llama")
    with paged_attention(model):
        compiled(model)
        assert graphs() == 0
        config = CompileConfig(backend="eager", mode="default")
        config._compile_all_devices = True
        compiled(model, compile_config=config)
        assert graphs() == 1
        assert not PagedCache(model.config).is_compileable, "elsewhere a graph would be given tensors that grow"


def test_the_switch(llama: PreTrainedModel) -> None:
    enable_paged_attention(llama, compile=False)
    config = CompileConfig(backend="eager", mode="default")
    config._compile_all_devices = True
    compiled(llama, compile_config=config)
    assert graphs() == 0
    enable_paged_attention(llama, compile=True)
    compiled(llama, disable_compile=True)
    assert graphs() == 0
    compiled(llama)
    assert graphs() == 1


def test_within_a_with_statement_the_switch_is_put_back() -> None:
    model = build_model("llama")
    enable_paged_attention(model, compile=False)
    with paged_attention(model, compile=True), compiled_quickly(model):
        compiled(model)
    assert graphs() == 1
    with compiled_quickly(model):
        compiled(model)
    assert graphs() == 1
    before = set(vars(build_model("llama")))
    disable_paged_attention(model)
    assert set(vars(model)) - before <= {"_compiled_call", "_last_compile_config"}, "which transformers keeps"


def test_a_model_that_is_not_enabled_is_not_compiled() -> None:
    model = build_model("llama")
    with compiled_quickly(model):
        compiled(model)
    assert graphs() == 0


def test_static_caches_of_an_enabled_model_compile_as_before(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    config = CompileConfig(backend="eager", mode="default", fullgraph=True)
    config._compile_all_devices = True
    cache = StaticCache(config=llama.config, max_cache_len=40)
    got = generate(llama, ids, mask, cache, compile_config=config)
    assert graphs() == 1
    same_tokens(llama, got, generate_dynamic(llama, ids, mask), mask)


def test_an_enabled_model_without_a_cache_is_one_graph() -> None:
    model = build_model("llama")
    enable_paged_attention(model)
    ids, _ = random_prompts((6, 6))
    got = torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, use_cache=False, labels=ids)
    got.loss.backward()
    assert graphs() == 1
    torch.testing.assert_close(got.logits, build_model("llama")(input_ids=ids).logits)


def test_what_a_mask_hides_is_decoded_eagerly(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    paged, dynamic = PagedCache(llama.config), DynamicCache(config=llama.config)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    with torch.no_grad():
        for cache in (paged, dynamic):
            forward(llama, ids, cache, attention_mask=mask)
        for hidden in (4, 6, None):
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
            seen = mask.clone()
            if hidden is not None:
                seen[1, hidden] = 0
            made = graphs()
            got = step(input_ids=ids[:, :1], attention_mask=seen, **{CACHE_ARGUMENT: paged}).logits
            assert graphs() - made == (hidden is None)
            want = forward(llama, ids[:, :1], dynamic, attention_mask=seen).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("reason", ["state", "mark", "refusal", "changed keys", "mask"])
def test_what_cannot_be_compiled_is_decoded_eagerly_and_said_once(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model("qwen3_next" if reason == "state" else "llama")
    with paged_attention(model, compile=True), compiled_quickly(model), caplog.at_level(logging.WARNING, "hf_paged"):
        if reason == "mark":
            model._can_compile_fullgraph = False
        if reason == "refusal":  # an option that the kernels do not have, and no graph the dense way for
            attend = type(model.model.layers[0].self_attn).forward
            for layer in model.model.layers:
                layer.self_attn.forward = _with_weights(attend, layer.self_attn)
        if reason == "changed keys":
            model.model.layers[1].self_attn.register_forward_pre_hook(_change_keys, with_kwargs=True)
        if reason == "mask":  # as of models that see an image both ways; this one changes nothing
            create = functools.partial(create_masks_for_generate, or_mask_function=lambda *where: where[2] < 0)
            model.create_masks_for_generate = create
        for _ in range(2):
            compiled(model)
    said = [record.getMessage() for record in caplog.records if "without torch.compile" in record.getMessage()]
    assert len(said) == 1
    assert type(model).__name__ in said[0]
    assert graphs() == 0


class _ChangesKeys:
    """A cache for one layer that gives it other keys than it got."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.update(*args, **kwargs)
        return keys + 0, values


def _change_keys(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    name = "cache" if "cache" in kwargs else "past_key_values"
    if isinstance(kwargs[name], PagedCache | StepCache):
        kwargs[name] = _ChangesKeys(kwargs[name])
    return args, kwargs


def _with_weights(attend: Any, module: torch.nn.Module) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return attend(module, *args, **kwargs, output_attentions=True)

    return forward


# A model that the user compiled ---------------------------------------------------------------------------------------


def decode_by_hand(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: PagedCache, steps: int) -> torch.Tensor:
    new, row_ids = ids, ids
    with torch.no_grad():
        for _ in range(steps):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :].contiguous()
            output = forward(model, new, cache, attention_mask=mask, position_ids=positions)
            assert output[CACHE_ARGUMENT] is cache
            new = output.logits[:, -1:].argmax(-1)
            row_ids = torch.cat((row_ids, new), dim=1)
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
    return row_ids


@pytest.mark.smoke
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_forward_decodes_in_one_graph(fullgraph: bool) -> None:
    model = enable_paged_attention(build_model("llama"))
    reference = tiny_model("llama")
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=fullgraph)
    for count, by_hand in enumerate((False, True), start=1):
        for lengths in (RAGGED, (8, 2, 20)):
            ids, mask = random_prompts(lengths)
            cache = PagedCache(model.config)
            got = decode_by_hand(model, ids, mask, cache, 12) if by_hand else generate(model, ids, mask, cache)
            same_tokens(reference, got, generate_dynamic(reference, ids, mask), mask)
        assert graphs() == count, "generate() passes other arguments"
    assert torch._dynamo.eval_frame._stance.stance == "default", "what was set for prompts was put back"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_decodes_right(in_place: bool) -> None:
    model = enable_paged_attention(build_model("llama"))
    reference = tiny_model("llama")
    wrapped: Any = model
    model.compile(backend="eager") if in_place else (wrapped := torch.compile(model, backend="eager"))
    for lengths in (RAGGED, (8, 2, 20)):
        ids, mask = random_prompts(lengths)
        got = decode_by_hand(wrapped, ids, mask, PagedCache(model.config), 12)
        same_tokens(reference, got, generate_dynamic(reference, ids, mask), mask)
        got = generate(wrapped, ids, mask, PagedCache(model.config))
        same_tokens(reference, got, generate_dynamic(reference, ids, mask), mask)


def test_a_whole_model_in_one_graph_is_refused_with_what_to_do() -> None:
    model = enable_paged_attention(build_model("llama"))
    cache = PagedCache(model.config)
    ids, _ = random_prompts((5, 5))
    with torch.no_grad():
        forward(model, ids, cache)
        before = snapshot(cache)
        with pytest.raises(Exception, match="let generate\\(\\) compile"):
            forward(torch.compile(model, backend="eager", fullgraph=True), ids[:, :1], cache)
        assert_unchanged(cache, before)
        forward(model, ids[:, :1], cache)


@pytest.mark.parametrize("changes", [False, True])
def test_the_first_pass_of_a_pool_is_eager(llama: PreTrainedModel, changes: bool) -> None:
    """A cache may be filled without the model; what a model does with keys and values is seen in a pass."""
    if changes:
        llama.model.layers[1].self_attn.register_forward_pre_hook(_change_keys, with_kwargs=True)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    ids, _ = random_prompts((5, 5))
    dynamic, paged = DynamicCache(config=llama.config), PagedCache(llama.config)
    with torch.no_grad():
        forward(llama, ids, dynamic)
        for index, layer in enumerate(dynamic.layers):
            paged.update(layer.keys, layer.values, index)
        for made in (0, 1, 1):
            mask = torch.ones(2, dynamic.get_seq_length() + 1, dtype=torch.long)
            got = step(input_ids=ids[:, :1], attention_mask=mask, **{CACHE_ARGUMENT: paged}).logits
            assert graphs() == (0 if changes else made)
            want = forward(llama, ids[:, :1], dynamic, attention_mask=mask).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_a_compiled_forward_with_gradients_takes_the_eager_way() -> None:
    model = enable_paged_attention(build_model("llama"))
    model.forward = torch.compile(model.forward, backend="eager")
    cache = PagedCache(model.config)
    ids, _ = random_prompts((5, 5))
    forward(model, ids, cache)
    output = forward(model, ids[:, :1], cache)
    assert graphs() == 0
    with pytest.raises(NotImplementedError, match="backward"):
        output.logits.sum().backward()


# Never into old slots -------------------------------------------------------------------------------------------------


def test_steps_of_several_caches_in_turn(llama: PreTrainedModel) -> None:
    pool = BlockPool()
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    caches = [PagedCache(llama.config, pool=pool) for _ in range(3)]
    prompts = [random_prompts((4 + i, 9, 2), seed=i) for i in range(3)]
    masks = [mask for _, mask in prompts]
    tokens = [ids for ids, _ in prompts]
    news = list(tokens)
    with torch.no_grad():
        for turn in range(20):
            for i, cache in enumerate(caches):
                run = llama if turn == 0 else step
                positions = (masks[i].cumsum(1) - 1).clamp(min=0)[:, -news[i].shape[1] :].contiguous()
                arguments = {"attention_mask": masks[i], "position_ids": positions, CACHE_ARGUMENT: cache}
                news[i] = run(input_ids=news[i], **arguments).logits[:, -1:].argmax(-1)
                tokens[i] = torch.cat((tokens[i], news[i]), dim=1)
                masks[i] = torch.cat((masks[i], masks[i].new_ones(3, 1)), dim=1)
    assert graphs() == 1
    check_books(*caches)
    for got, (ids, mask) in zip(tokens, prompts, strict=True):
        same_tokens(llama, got, generate_dynamic(llama, ids, mask, max_new_tokens=20), mask)


def test_threads_on_one_pool(llama: PreTrainedModel) -> None:
    compiled(llama)
    pool = BlockPool()
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        ids, mask = random_prompts((3 + number, 17, 9), seed=number)
        results[number] = generate(llama, ids, mask, PagedCache(llama.config, pool=pool), max_new_tokens=30)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, got in results.items():
        ids, mask = random_prompts((3 + number, 17, 9), seed=number)
        same_tokens(llama, got, generate_dynamic(llama, ids, mask, max_new_tokens=30), mask)
    assert len(results) == 4


def test_a_step_for_which_no_block_is_left_changes_nothing(llama: PreTrainedModel) -> None:
    ids, _ = random_prompts((6, 6, 6))
    cache = PagedCache(llama.config, block_size=4, num_blocks=9)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    with torch.no_grad():
        forward(llama, ids, cache)
        with pytest.raises(OutOfBlocksError):
            for _ in range(20):
                before = snapshot(cache)
                step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: cache})
        assert_unchanged(cache, before)
        cache.release([1])
        assert cache.get_seq_length() == 12
    assert graphs() == 1


def test_a_graph_that_fails_changes_nothing(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels import cpu

    ids, _ = random_prompts((6, 6, 6))
    cache = PagedCache(llama.config)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    with torch.no_grad():
        forward(llama, ids, cache)
        step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: cache})
        before = snapshot(cache)

        def failing(*args: Any, **kwargs: Any) -> Any:
            raise FloatingPointError("stopped here")

        with monkeypatch.context() as patch:
            patch.setattr(cpu, "decode", failing)
            with pytest.raises(FloatingPointError, match="stopped here"):
                step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: cache})
        assert_unchanged(cache, before)
        got = step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: cache}).logits
        whole = torch.cat((ids, ids[:, :1], ids[:, :1]), dim=1)
        want = llama(input_ids=whole).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_keys_that_are_changed_later_on_are_noticed(fullgraph: bool) -> None:
    """What a graph is handed in place of keys is NaN: it must reach nothing but the kernel."""
    model = build_model("llama")
    pool = BlockPool()
    ids, mask = random_prompts(RAGGED)
    paged, dynamic = PagedCache(model.config, pool=pool), DynamicCache(config=model.config)
    with paged_attention(model, compile=True), compiled_quickly(model), torch.no_grad():
        model.generation_config.compile_config.fullgraph = fullgraph
        compiled(model, cache=PagedCache(model.config, pool=pool))
        assert graphs() == 1
        for cache in (paged, dynamic):
            forward(model, ids, cache, attention_mask=mask)
        model.model.layers[1].self_attn.register_forward_pre_hook(_change_keys, with_kwargs=True)
        step = model.get_compiled_call(model.generation_config.compile_config)
        for _ in range(2):
            mask = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
            got = step(input_ids=ids[:, :1], attention_mask=mask, **{CACHE_ARGUMENT: paged}).logits
            want = forward(model, ids[:, :1], dynamic, attention_mask=mask).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
        check_books(paged)


def test_keys_that_are_changed_before_a_prompt_are_noticed() -> None:
    """The mask of a prompt was left to the kernel, as on the cache before."""
    model = build_model("llama")
    pool = BlockPool()
    with paged_attention(model):
        compiled(model, cache=PagedCache(model.config, pool=pool))
        model.model.layers[1].self_attn.register_forward_pre_hook(_change_keys, with_kwargs=True)
        cache = PagedCache(model.config, pool=pool)
        with pytest.raises(RuntimeError, match="did not pass its keys"):
            compiled(model, cache=cache)
        for _ in range(2):
            compiled(model, cache=PagedCache(model.config, pool=pool))


def test_a_graph_that_fails_holds_no_block(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels import cpu

    pool = BlockPool()
    compiled(llama, cache=PagedCache(llama.config, pool=pool))
    ids, mask = random_prompts(RAGGED)
    for error in (FloatingPointError, KeyboardInterrupt):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "decode", lambda *args, error=error, **kwargs: (_ for _ in ()).throw(error("here")))
            with pytest.raises(error, match="here"):
                generate(llama, ids, mask, PagedCache(llama.config, pool=pool))
        gc.collect()
        assert pool.allocators[0].num_used == 0
        made = graphs()
        compiled(llama, cache=PagedCache(llama.config, pool=pool))
        assert graphs() == made == 1, "and the next is compiled as before"


@pytest.mark.parametrize("runs", [0, 1, 3])
def test_what_goes_wrong_while_a_graph_is_made_need_not_go_wrong_without_one(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """As where a CUDA graph cannot be captured; later on an error is one."""
    from hf_paged.kernels import ops

    calls = 0

    class Failing(weakref.WeakValueDictionary):
        def get(self, key: Any, default: Any = None) -> Any:
            nonlocal calls
            calls += 1
            if calls > runs * 2:  # layers
                raise RuntimeError("not permitted while capturing")
            return super().get(key, default)

    monkeypatch.setattr(ops, "_bound", Failing())
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(llama.config)
    if runs < 3:
        got = generate(llama, ids, mask, cache)
        same_tokens(llama, got, generate_dynamic(llama, ids, mask), mask)
    else:
        with pytest.raises(RuntimeError, match="while capturing"):
            generate(llama, ids, mask, cache)


def test_an_interrupted_prompt_leaves_compilation_on() -> None:
    model = enable_paged_attention(build_model("llama"))
    inner = model.model.layers[0].mlp
    model.forward = torch.compile(model.forward, backend="eager")
    ids, _ = random_prompts((5, 5))
    cache = PagedCache(model.config)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = inner.register_forward_pre_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        forward(model, ids, cache)
    hook.remove()
    del cache
    gc.collect()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_reason_of_one_cache_is_none_of_another(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels import reference

    monkeypatch.setattr(reference, "serves_graphs", lambda device: False)
    with use_backend("reference"):
        compiled(llama)
    assert graphs() == 0
    llama.train()
    compiled(llama)
    assert graphs() == 0
    llama.eval()
    compiled(llama)
    assert graphs() == 1


def test_threads_that_begin_together_compile_once(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    threads = [
        threading.Thread(target=lambda: generate(llama, ids, mask, PagedCache(llama.config, num_blocks=99)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert graphs() == 1


def test_a_pool_goes_with_its_caches(llama: PreTrainedModel) -> None:
    cache = PagedCache(llama.config)
    compiled(llama, cache=cache)
    blocks = weakref.ref(cache.pool.storages[0])
    del cache
    gc.collect()
    assert blocks() is None


# What the host does ---------------------------------------------------------------------------------------------------


def test_a_mask_that_only_grew_is_not_read(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    begin = Rows.begin

    def watched(*args: Any, extends: bool = False, **kwargs: Any) -> Any:
        seen.append(extends)
        return begin(*args, extends=extends, **kwargs)

    monkeypatch.setattr(Rows, "begin", watched)
    compiled(llama, max_new_tokens=10)
    assert seen == [False, False] + [True] * 8, "the prompt's, and the first step's, are read"


@pytest.mark.parametrize("grown", [False, True])
def test_a_mask_that_was_changed_is_read(llama: PreTrainedModel, grown: bool) -> None:
    """Before it grows for the next step, and afterwards."""
    ids, mask = random_prompts((6, 6))
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    logits = []
    for cache in (PagedCache(llama.config), DynamicCache(config=llama.config)):
        run = llama if isinstance(cache, DynamicCache) else step
        with torch.no_grad():
            output = forward(llama, ids, cache, attention_mask=mask.clone())
            kwargs = {"attention_mask": mask.clone(), CACHE_ARGUMENT: cache}
            for hides in (False, False, True):
                if hides and not grown:
                    kwargs["attention_mask"][:, 3] = 0
                kwargs = llama._update_model_kwargs_for_generation(output, kwargs)
                if hides and grown:
                    kwargs["attention_mask"][:, 3] = 0
                output = run(input_ids=ids[:, :1], **kwargs)
        logits.append(output.logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)


def test_a_mask_that_grew_by_less_than_the_step_is_refused(llama: PreTrainedModel) -> None:
    """As by the eager way: what is known of a mask is no leave to trust its length."""
    ids, mask = random_prompts((6, 6))
    cache = PagedCache(llama.config)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    with torch.no_grad():
        output = forward(llama, ids, cache, attention_mask=mask)
        kwargs = {"attention_mask": mask, CACHE_ARGUMENT: cache}
        for _ in range(2):
            kwargs = llama._update_model_kwargs_for_generation(output, kwargs)
            output = step(input_ids=ids[:, :1], **kwargs)
        kwargs = llama._update_model_kwargs_for_generation(output, kwargs)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="attention_mask has the shape"):
            step(input_ids=ids[:, :2], **kwargs)
        assert_unchanged(cache, before)
    assert EAGER_BECAUSE not in vars(llama), "no graph was tried"


def test_a_full_pool_at_the_first_step_switches_nothing_off(llama: PreTrainedModel) -> None:
    ids, _ = random_prompts((6, 6, 6))
    cache = PagedCache(llama.config, block_size=2, num_blocks=9)
    step = llama.get_compiled_call(llama.generation_config.compile_config)
    with torch.no_grad():
        forward(llama, ids, cache)
        with pytest.raises(OutOfBlocksError):
            step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: cache})
    assert EAGER_BECAUSE not in vars(llama)
    compiled(llama, (6, 6, 6))
    assert graphs() == 1


def test_addresses_stay(llama: PreTrainedModel) -> None:
    pool = BlockPool()
    places: set[tuple[int, ...]] = set()
    prepare = StepCache.prepare

    def watched(self: StepCache, *args: Any) -> None:
        prepare(self, *args)
        group = self.first
        places.add((id(self), group.block_table.data_ptr(), group.positions.data_ptr(), group.length.data_ptr()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCache, "prepare", watched)
        for lengths in (RAGGED, (40, 2, 5)):
            compiled(llama, lengths, cache=PagedCache(llama.config, pool=pool), max_new_tokens=20)
    assert len(places) == 1


def test_inductor_sees_no_input_that_moves_and_makes_no_copy_of_blocks() -> None:
    """What a CUDA graph needs: every input that is written has its place, and the pool is written where it is."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen: list[tuple[Any, list[int], list[torch.fx.Node]]] = []

    def inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        made = compile_fx_inner(graph, inputs, **options)
        seen.append((made, list(options["static_input_idxs"]), list(graph.graph.find_nodes(op="placeholder"))))
        return made

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner)

    model = build_model("llama")
    ids, mask = random_prompts(RAGGED)
    with paged_attention(model, compile=True), torch._inductor.config.patch(fx_graph_cache=False):
        config = CompileConfig(backend=backend, mode="default", fullgraph=True)
        generate(model, ids, mask, PagedCache(model.config), compile_config=config)
        assert EAGER_BECAUSE not in vars(model)
    ((made, static, places),) = seen
    written = set(made.mutated_input_idxs)
    blocks = {i for i, place in enumerate(places) if getattr(place.meta["val"], "ndim", 0) == 5}
    assert len(blocks) == 2, "one tensor of blocks a layer"
    assert written == blocks <= set(static)
    tables = {i for i, p in enumerate(places) if getattr(p.meta["val"], "dtype", None) == torch.int32}
    assert len(tables) == 2, "a block table and positions"
    assert tables <= set(static)
    assert not counters["inductor"]["possibly_missed_reinplacing_opportunities"]
    # No number of those that the graph is given is another one in every step.
    sizes = [p for p in places if isinstance(p.meta["val"], torch.SymInt)]
    assert len(sizes) == 1, "the width of the table"


def test_blocks_that_keys_and_values_do_not_share() -> None:
    """Keys and values of different dtypes or widths are two tensors, and both are written."""
    from hf_paged.kernels import cpu
    from hf_paged.kernels.ops import bind, blocks_of, decode_step
    from hf_paged.plan import GroupPlan
    from hf_paged.storage import LayerStorage

    storage = LayerStorage(6, 4, 2, 16, 8, torch.float32, torch.float32, torch.device("cpu"))
    lengths, positions = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([[2], [-1]], dtype=torch.int32)
    storage.key_blocks.normal_()
    storage.value_blocks.normal_()
    before = storage.key_blocks.clone()
    plan = GroupPlan(torch.tensor([[5], [0]], dtype=torch.int32), lengths, positions, max_context=3)
    bound = bind(storage, cpu, plan)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 8)
    got = decode_step(query, key, value, *blocks_of(storage), plan.block_table, positions, None, None, 0.25, None, None)
    assert bound.plan is plan
    assert torch.equal(storage.key_blocks[5, :, 2], key[0, :, 0])
    assert torch.equal(storage.value_blocks[5, :, 2], value[0, :, 0])
    before[5, :, 2] = key[0, :, 0]
    assert torch.equal(storage.key_blocks, before), "a row of padding touches no block"
    keys, values = storage.key_blocks[5, :, :3], storage.value_blocks[5, :, :3]
    want = torch.nn.functional.scaled_dot_product_attention(
        query[0], keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0), scale=0.25
    )
    torch.testing.assert_close(got[0, 0], want[:, 0])
    assert not got[1].any()
    del bound
    with pytest.raises(RuntimeError, match="no cache is using"):
        decode_step(query, key, value, *blocks_of(storage), plan.block_table, positions, None, None, 0.25, None, None)
