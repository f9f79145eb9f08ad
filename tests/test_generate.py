"""generate() with a PagedCache gives what it gives with transformers' own cache, enabled or not, on each backend."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import (
    CACHE_ARGUMENT,
    ENABLED_WAYS,
    PAD,
    VOCAB,
    WAYS,
    blocks_of,
    build_model,
    check_books,
    generate,
    generate_dynamic,
    greedy_alone,
    pad_left,
    random_prompts,
    run_way,
    same_tokens,
    tiny_model,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_paged import IMPLEMENTATION, PagedCache, paged_attention

FAMILIES = ("llama", "qwen3", "gpt2")
EMBEDDING = {"llama": "model.embed_tokens", "qwen3": "model.embed_tokens", "gpt2": "transformer.wte"}
RAGGED = (3, 17, 9)

every_family = pytest.mark.parametrize("family", FAMILIES)
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return tiny_model(family)


def generate_paged(
    model: PreTrainedModel, way: str, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> Any:
    """Run `generate` on a new PagedCache, and check the cache's books and lengths after it."""
    cache = PagedCache(model.config, block_size=options.pop("block_size", 16))
    with run_way(model, way):
        output = generate(model, ids, mask, cache, **options)
    check_books(cache)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    if not options.get("num_beams"):
        assert cache.get_seq_length() == sequences.shape[1] - 1
        assert len(cache.row_lengths) == len(sequences)
        used, alone = cache.stats().used_blocks, blocks_of(cache, cache.row_lengths)
        if way in ENABLED_WAYS and options.get("num_return_sequences"):
            assert used <= alone  # the rows of a prompt share its full blocks
        else:
            assert used == alone
    return output


def seeded(function: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    return function(*args, **options)


def assert_close(actual: Any, expected: Any) -> None:
    """Compare (nested) tuples of tensors; places that are masked with -inf must agree exactly."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        return
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


# Lengths ---------------------------------------------------------------------------------------------------------


@every_family
@every_way
@pytest.mark.parametrize(
    ("block_size", "prompt", "new"),
    [
        (16, 1, 1),
        (16, 1, 34),
        (16, 15, 1),
        (16, 15, 2),
        (16, 15, 3),
        (16, 16, 18),
        (16, 17, 16),
        (16, 33, 17),
        (1, 5, 4),
        (4, 3, 14),
        (4, 4, 5),
        (64, 63, 3),
        (64, 65, 2),
    ],
)
def test_greedy_at_every_edge_of_a_block(
    model: PreTrainedModel, way: str, block_size: int, prompt: int, new: int
) -> None:
    ids, _ = random_prompts([prompt])
    expected = generate_dynamic(model, ids, max_new_tokens=new)
    same_tokens(model, generate_paged(model, way, ids, block_size=block_size, max_new_tokens=new), expected)


@every_way
def test_several_hundred_new_tokens(way: str) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts([5, 21])
    expected = generate_dynamic(model, ids, mask, max_new_tokens=260)
    same_tokens(model, generate_paged(model, way, ids, mask, max_new_tokens=260), expected, mask)


@pytest.mark.smoke
@every_family
@every_way
def test_left_padded_rows_equal_dynamic_and_each_row_alone(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    output = generate_paged(model, way, ids, mask, max_new_tokens=20)
    same_tokens(model, output, generate_dynamic(model, ids, mask, max_new_tokens=20), mask)
    for row, length in enumerate(RAGGED):
        same_tokens(model, output[row, -length - 20 :], greedy_alone(model, ids[row, -length:], 20))


@every_way
@pytest.mark.parametrize("block_size", [1, 4, 64, 256])
def test_block_size_does_not_change_a_ragged_batch(way: str, block_size: int) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts([1, 16, 33, 4])
    expected = generate_dynamic(model, ids, mask, max_new_tokens=19)
    same_tokens(model, generate_paged(model, way, ids, mask, block_size=block_size, max_new_tokens=19), expected, mask)


@every_way
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_windowed_models_equal_each_row_alone(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts([3, 21, 9])
    for block_size in (4, 16):
        output = generate_paged(model, way, ids, mask, block_size=block_size, max_new_tokens=20)
        for row, length in enumerate([3, 21, 9]):
            same_tokens(model, output[row, -length - 20 :], greedy_alone(model, ids[row, -length:], 20))


# Decoding methods ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@every_family
@every_way
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.3, "top_k": 0}, {"top_k": 7}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}],
    ids=["temperature", "top_k", "top_p"],
)
def test_sampling_with_one_seed_gives_the_same_tokens(model: PreTrainedModel, way: str, options: dict) -> None:
    ids, mask = random_prompts(RAGGED)
    options = options | {"do_sample": True, "max_new_tokens": 20}
    expected = seeded(generate_dynamic, model, ids, mask, **options)
    assert torch.equal(seeded(generate_paged, model, way, ids, mask, **options), expected)


@every_way
def test_several_sampled_sequences_of_each_prompt(way: str) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 18}
    expected = seeded(generate_dynamic, model, ids, mask, **options)
    assert len({tuple(row) for row in expected.tolist()}) == 9
    assert torch.equal(seeded(generate_paged, model, way, ids, mask, **options), expected)


@pytest.mark.smoke
@every_family
@every_way
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "eos_token_id": list(range(0, VOCAB, 9))},
        {"num_beams": 3, "do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
        {"num_beams": 2, "length_penalty": 2.0, "eos_token_id": list(range(0, VOCAB, 9)), "block_size": 4},
    ],
    ids=["beams", "early_stopping", "beam_sampling", "length_penalty"],
)
def test_beam_search(model: PreTrainedModel, way: str, options: dict) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"max_new_tokens": 18} | options
    dynamic_options = {name: option for name, option in options.items() if name != "block_size"}
    expected = seeded(generate_dynamic, model, ids, mask, **dynamic_options)
    assert torch.equal(seeded(generate_paged, model, way, ids, mask, **options), expected)


@every_way
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drafts", ["assistant", "prompt_lookup"])
def test_assisted_decoding(way: str, drafts: str, do_sample: bool) -> None:
    model = tiny_model("llama")
    prompt = random_prompts([6])[0].repeat(1, 4)  # repeats itself, so that looking up finds candidates
    if drafts == "assistant":
        assistant = build_model("llama", seed=0)
        with torch.no_grad():  # nearly the same model, so that some candidates are kept and some are not
            assistant.lm_head.weight += 0.05 * torch.randn(
                assistant.lm_head.weight.shape, generator=torch.Generator().manual_seed(3)
            )
        options: dict[str, Any] = {"assistant_model": assistant}
    else:
        options = {"prompt_lookup_num_tokens": 4}
    options |= {"do_sample": do_sample, "max_new_tokens": 30}
    expected = seeded(generate_dynamic, model, prompt, **options)
    actual = seeded(generate_paged, model, way, prompt, **options)
    if do_sample:
        assert torch.equal(actual, expected)
    else:
        same_tokens(model, actual, expected)
        same_tokens(model, actual, generate_dynamic(model, prompt, max_new_tokens=30))


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_enabled_assistant_drafts_with_a_paged_cache_of_its_own(do_sample: bool) -> None:
    model, assistant = tiny_model("llama"), build_model("llama", seed=0)
    with torch.no_grad():
        noise = torch.randn(assistant.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
        assistant.lm_head.weight += 0.05 * noise
    prompt = random_prompts([6])[0].repeat(1, 4)
    options = {"assistant_model": assistant, "do_sample": do_sample, "max_new_tokens": 30}
    expected = seeded(generate_dynamic, model, prompt, **options)
    caches = []
    hook = assistant.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs.get(CACHE_ARGUMENT)), with_kwargs=True
    )
    with paged_attention(assistant):
        actual = seeded(generate_paged, model, "cpu", prompt, **options)
    hook.remove()
    assert torch.equal(actual, expected)
    assert len(caches) > 3 and all(cache is caches[0] for cache in caches)
    assert isinstance(caches[0], PagedCache) and caches[0].block_size == 16
    assert caches[0].layers[0].backend.name == "cpu"
    check_books(caches[0])


# What generate() is given, and gives back ------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE_ARGUMENT}))
@pytest.mark.filterwarnings("ignore:.*past_key_values.*is deprecated:FutureWarning")
def test_the_cache_is_taken_under_both_of_its_names(way: str, name: str) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(model.config)
    eos = {"eos_token_id": [int(token) for token in range(1, VOCAB, 4)]}  # rows end, which enabled models must notice
    with run_way(model, way):
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=PAD, **{name: cache}, **eos
        )
    same_tokens(model, output, generate_dynamic(model, ids, mask, **eos), mask)
    assert cache.stats().tokens > 0
    if way != "plain":
        assert cache.row_lengths == stored_lengths(ids, mask, output, eos["eos_token_id"])


@pytest.mark.filterwarnings("error:.*past_key_values.*is deprecated:FutureWarning")
def test_the_old_name_of_the_cache_is_no_reason_to_warn() -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(model.config)
    with paged_attention(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, past_key_values=cache)
    assert cache.stats().tokens > 0


@pytest.mark.parametrize("by_position", [False, True], ids=["config-named", "config-by-position"])
def test_a_model_with_any_arguments_in_its_generate(by_position: bool) -> None:
    """As Granite Speech and Kyutai have."""
    model = build_model("llama")
    expected = generate_dynamic(model, *random_prompts([9, 9]), max_new_tokens=4)
    taken = []

    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        taken.append(len(args))
        return LlamaForCausalLM.generate(self, *args, **kwargs)

    model.__class__ = type("Own", (LlamaForCausalLM,), {"generate": generate, "__module__": __name__})
    ids, config = random_prompts([9, 9])[0], GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    cache = PagedCache(model.config, prefix_cache=True)
    args, kwargs = ((ids, config), {}) if by_position else ((ids,), {"generation_config": config})
    with paged_attention(model):
        for given in ({}, {CACHE_ARGUMENT: cache}):
            assert torch.equal(model.generate(*args, **given, **kwargs), expected)
    assert taken == [len(args)] * 2 and cache.stats().tokens > 0
    assert len(cache.pool.prefixes) == 0 or not by_position  # what they mean, only it knows


def test_a_function_in_place_of_generate_that_has_the_signature_of_the_method() -> None:
    model = build_model("llama")
    expected = generate_dynamic(model, *random_prompts([9, 9]), max_new_tokens=4)
    method = model.generate
    model.generate = functools.wraps(LlamaForCausalLM.generate)(lambda *args, **kwargs: method(*args, **kwargs))
    ids, config = random_prompts([9, 9])[0], GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    with paged_attention(model):
        assert torch.equal(model.generate(ids, config, **{CACHE_ARGUMENT: PagedCache(model.config)}), expected)


def test_a_generate_of_the_users_own_reads_the_cache_under_the_name_that_it_has() -> None:
    model = build_model("llama")
    seen = []

    def generate(self: PreTrainedModel, ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        seen.append(past_key_values)
        return LlamaForCausalLM.generate(self, ids, **{CACHE_ARGUMENT: past_key_values}, **kwargs)

    model.__class__ = type("Own", (LlamaForCausalLM,), {"generate": generate, "__module__": __name__})
    cache = PagedCache(model.config)
    with paged_attention(model):
        model.generate(random_prompts([9, 9])[0], past_key_values=cache, max_new_tokens=2)
    assert seen == [cache]


def stored_lengths(ids: torch.Tensor, mask: torch.Tensor, output: torch.Tensor, eos: list[int]) -> list[int]:
    """Real tokens per row that a generate() call must leave in the cache: all that were fed, up to the row's end."""
    lengths = []
    for row in range(len(output)):
        new = output[row, ids.shape[1] :].tolist()
        end = next((place + 1 for place, token in enumerate(new) if token in eos), len(new))
        lengths.append(int(mask[row].sum()) + min(end, len(new) - 1))
    return lengths


class TokenCollector(BaseStreamer):
    """Collects what a streamer is handed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@every_way
def test_streamers_see_every_token_as_it_comes(way: str) -> None:
    model = tiny_model("llama")
    ids, _ = random_prompts([7])
    streamer = TokenCollector()
    output = generate_paged(model, way, ids, max_new_tokens=20, streamer=streamer)
    same_tokens(model, output, generate_dynamic(model, ids, max_new_tokens=20))
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended


class FavourSeen(LogitsProcessor):
    """Depends on the whole row, padding included, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen.append(input_ids.clone())
        return scores.scatter_add(1, input_ids, torch.full(input_ids.shape, 0.3))


@every_family
@every_way
def test_logits_processors(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": [5, 6, 7]}
    ours, theirs = FavourSeen(), FavourSeen()
    expected = generate_dynamic(model, ids, mask, logits_processor=LogitsProcessorList([theirs]), **options)
    actual = generate_paged(model, way, ids, mask, logits_processor=LogitsProcessorList([ours]), **options)
    assert torch.equal(actual, expected)
    assert len(ours.seen) == len(theirs.seen) and all(map(torch.equal, ours.seen, theirs.seen))


class StopRows(StoppingCriteria):
    """Ends row `i` at length `lengths[i]`."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return input_ids.shape[1] >= self.lengths


@pytest.mark.smoke
@every_family
@every_way
def test_rows_that_a_stopping_criterion_ends_at_different_times(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    # transformers pads rows that ended only where there is an EOS token, which no row reaches here.
    options = {"stopping_criteria": StoppingCriteriaList([StopRows([27, 19, 37])]), "eos_token_id": VOCAB + 1}
    expected = generate_dynamic(model, ids, mask, max_new_tokens=30, **options)
    assert expected.shape[1] == 37 and expected[0, 27:].eq(PAD).all() and expected[1, 19:].eq(PAD).all()
    same_tokens(model, generate_paged(model, way, ids, mask, max_new_tokens=30, **options), expected, mask)


@every_way
def test_rows_that_end_without_an_eos_token_go_on_as_with_dynamic(way: str) -> None:
    """Without an EOS token transformers goes on feeding and returning the tokens of rows that a criterion ended."""
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    options = {"stopping_criteria": StoppingCriteriaList([StopRows([27, 19, 37])]), "max_new_tokens": 30}
    expected = generate_dynamic(model, ids, mask, **options)
    assert not expected[1, 19:].eq(PAD).all()
    same_tokens(model, generate_paged(model, way, ids, mask, **options), expected, mask)


@pytest.mark.smoke
@every_family
@every_way
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_that_end_on_eos_at_different_times(model: PreTrainedModel, way: str, do_sample: bool) -> None:
    ids, mask = random_prompts([3, 17, 9, 12])
    options = {"max_new_tokens": 25, "do_sample": do_sample}
    free = seeded(generate_dynamic, model, ids, mask, **options)[:, ids.shape[1] :]
    eos = [int(free[0, 3]), int(free[1, 11]), int(free[3, 15])]
    expected = seeded(generate_dynamic, model, ids, mask, eos_token_id=eos, **options)
    ends = {int(expected[row, ids.shape[1] :].eq(PAD).sum()) for row in range(4)}
    assert len(ends) >= 3
    actual = seeded(generate_paged, model, way, ids, mask, eos_token_id=eos, **options)
    same_tokens(model, actual, expected, mask)


@every_family
@every_way
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_of_each_step_are_close(model: PreTrainedModel, way: str, do_sample: bool) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "do_sample": do_sample,
        "top_k": 5,
    }
    expected = seeded(generate_dynamic, model, ids, mask, **options)
    actual = seeded(generate_paged, model, way, ids, mask, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_close(actual.logits, expected.logits)
    assert_close(actual.scores, expected.scores)
    returned = getattr(actual, CACHE_ARGUMENT)
    assert isinstance(returned, PagedCache) and returned.get_seq_length() == ids.shape[1] + 11


@every_family
@every_way
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hidden_states_are_close(family: str, way: str, implementation: str) -> None:
    model = tiny_model(family, implementation)
    ids, mask = random_prompts([9, 9])
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    expected = generate_dynamic(model, ids, mask, **options)
    actual = generate_paged(model, way, ids, mask, **options)
    assert_close(actual.hidden_states, expected.hidden_states)


@every_way
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_weights_are_close_where_they_are_asked_for(family: str, way: str) -> None:
    """GPT-2 does not tell its attention function that weights are asked for: enabled, it returns none, as with sdpa."""
    model = tiny_model(family, "eager")
    ids, mask = random_prompts(RAGGED)
    options = {"return_dict_in_generate": True, "output_attentions": True}
    expected = generate_dynamic(model, ids, mask, **options)
    actual = generate_paged(model, way, ids, mask, **options)
    same_tokens(model, actual.sequences, expected.sequences, mask)
    assert len(actual.attentions) == len(expected.attentions)
    real = mask.bool()
    for step, (ours, theirs) in enumerate(zip(actual.attentions, expected.attentions, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert one is not None and one.shape == other.shape
            if step == 0:  # rows of padding attend to nothing in particular
                one, other = one.transpose(1, 2)[real], other.transpose(1, 2)[real]
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@every_family
@every_way
@pytest.mark.parametrize("with_ids", [False, True])
def test_prompts_as_embeddings(model: PreTrainedModel, family: str, way: str, with_ids: bool) -> None:
    ids, mask = random_prompts(RAGGED)
    embeds = model.get_submodule(EMBEDDING[family])(ids).detach()
    options = {"attention_mask": mask, "inputs_embeds": embeds, "do_sample": False, "max_new_tokens": 18}
    options |= {"input_ids": ids} if with_ids else {}
    expected = generate_dynamic(model, ids, mask, max_new_tokens=18)
    with run_way(model, way):
        actual = model.generate(**options, **{CACHE_ARGUMENT: PagedCache(model.config)})
    same_tokens(model, actual if with_ids else torch.cat((ids, actual), dim=1), expected, mask)


@every_family
@every_way
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_prompts_in_chunks(model: PreTrainedModel, way: str, chunk: int) -> None:
    ids, mask = random_prompts([3, 33, 18])
    expected = generate_dynamic(model, ids, mask)
    same_tokens(model, generate_paged(model, way, ids, mask, prefill_chunk_size=chunk), expected, mask)


@every_way
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_prompts_in_chunks_under_a_window(model: PreTrainedModel, way: str, chunk: int) -> None:
    lengths = [3, 33, 18]
    ids, mask = random_prompts(lengths)
    output = generate_paged(model, way, ids, mask, prefill_chunk_size=chunk)
    for row, length in enumerate(lengths):
        same_tokens(model, output[row, -length - 12 :], greedy_alone(model, ids[row, -length:], 12))


# The model's own settings ----------------------------------------------------------------------------------------


@every_family
@every_way
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_implementation_that_the_model_came_with_does_not_matter(
    family: str, way: str, implementation: str
) -> None:
    model = tiny_model(family, implementation)
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(tiny_model(family, "eager"), ids, mask)
    same_tokens(model, generate_paged(model, way, ids, mask), expected, mask)


@every_way
def test_one_layer_and_many_heads(way: str) -> None:
    for heads, kv_heads, dim in ((1, 1, 64), (6, 6, 8), (8, 1, 32), (6, 2, 24)):
        model = build_model(
            "llama",
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=dim,
            num_hidden_layers=1,
            hidden_size=48,
        )
        ids, mask = random_prompts(RAGGED)
        same_tokens(model, generate_paged(model, way, ids, mask), generate_dynamic(model, ids, mask), mask)


@every_way
def test_a_prompt_without_a_mask(way: str) -> None:
    model = tiny_model("llama")
    ids, _ = random_prompts([9, 9])
    with run_way(model, way):
        actual = model.generate(ids, do_sample=False, max_new_tokens=12, **{CACHE_ARGUMENT: PagedCache(model.config)})
    same_tokens(model, actual, generate_dynamic(model, ids))


@pytest.mark.parametrize("way", ENABLED_WAYS)
def test_an_enabled_model_without_our_cache_equals_itself_before(way: str) -> None:
    for family in FAMILIES:
        model = tiny_model(family)
        ids, mask = random_prompts(RAGGED)
        expected = generate_dynamic(model, ids, mask)
        with run_way(model, way):
            assert torch.equal(generate_dynamic(model, ids, mask), expected)
            assert torch.equal(generate(model, ids, mask), expected)
            same_tokens(model, generate(model, ids, mask, use_cache=False), expected, mask)
            assert torch.equal(generate(model, ids, mask, cache_implementation="static"), expected)


def test_inference_mode_and_no_grad_mix() -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=20)
    for way in WAYS:
        for outside, inside in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
            cache = PagedCache(model.config)
            with run_way(model, way):
                with outside():
                    first = generate(model, ids, mask, cache, max_new_tokens=6)
                with inside():
                    full = torch.cat((mask, torch.ones(3, 6, dtype=torch.long)), dim=1)
                    second = generate(model, first.clone(), full, cache, max_new_tokens=14)
            same_tokens(model, second, expected, mask)


def test_rows_that_are_equal_stay_equal() -> None:
    model = tiny_model("llama")
    row = random_prompts([11])[0][0]
    ids, mask = pad_left([row, torch.cat((row, row)), row])
    for way in WAYS:
        output = generate_paged(model, way, ids, mask, max_new_tokens=40)
        assert torch.equal(output[0], output[2])


@pytest.mark.smoke
def test_from_config_under_our_name_needs_no_enabling() -> None:
    plain, ours = tiny_model("llama"), build_model("llama", attn_implementation=IMPLEMENTATION)
    ids, mask = random_prompts(RAGGED)
    eos = {"eos_token_id": [int(token) for token in range(1, VOCAB, 4)]}
    expected = generate_dynamic(plain, ids, mask, **eos)
    assert torch.equal(generate_dynamic(ours, ids, mask, **eos), expected)
    cache = PagedCache(ours.config)
    same_tokens(plain, generate(ours, ids, mask, cache, **eos), expected, mask)
    assert cache.row_lengths == [length + cache.get_seq_length() - 17 for length in RAGGED]  # padding is not stored
    with paged_attention(ours):
        same_tokens(plain, generate(ours, ids, mask, PagedCache(ours.config), **eos), expected, mask)


def test_one_cache_object_of_each_kind_in_turn() -> None:
    """The path leaves nothing behind that a later call with another cache would find."""
    model = tiny_model("qwen3")
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask)
    with paged_attention(model):
        for cache in (PagedCache(model.config), DynamicCache(config=model.config), None, PagedCache(model.config)):
            same_tokens(model, generate(model, ids, mask, cache), expected, mask)
