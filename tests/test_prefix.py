"""Prompts that are kept between calls: what is reused, what must not be, and what gives way."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    CACHE_ARGUMENT,
    PAD,
    build_model,
    check_books,
    fed,
    generate,
    generate_dynamic,
    model_with_mtp_layers,
    mtp_layers_at_random,
    pad_left,
    random_prompts,
    tiny_model,
)
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_paged import BlockPool, PagedCache, paged_attention
from hf_paged.allocator import BlockAllocator, BlockTable
from hf_paged.patches.prompts import begin_kept
from hf_paged.prefix import PrefixIndex

SYSTEM = random_prompts([50], seed=3)[0][0]


def prompt(length: int, seed: int) -> torch.Tensor:
    """The common beginning and `length` tokens of its own: `[1, 50 + length]`."""
    return torch.cat([SYSTEM, random_prompts([length], seed=seed)[0][0]])[None]


def prefilled(model: PreTrainedModel, ids: torch.Tensor, cache: PagedCache, mask=None, **options) -> tuple:
    """Tokens of a generate() call, and how many positions of the prompt it computed."""
    with fed(model) as shapes:
        tokens = generate(model, ids, torch.ones_like(ids) if mask is None else mask, cache, **options)
    check_books(cache)
    return tokens, shapes[0][1]


# The index alone ------------------------------------------------------------------------------------------------------


def kept(index: PrefixIndex, allocator: BlockAllocator, tokens: list[int], key: str = "model") -> None:
    table = BlockTable()
    allocator.grow([table], [len(tokens)])
    index.insert(key, tokens, [table])
    allocator.release(table)


def index_of(num_blocks: int) -> tuple[PrefixIndex, BlockAllocator]:
    allocator = BlockAllocator(num_blocks, block_size=4)
    index = PrefixIndex([allocator], 4)
    allocator.reclaim = lambda allocator_: index.evict()
    return index, allocator


def test_full_blocks_are_found_by_their_tokens_and_those_before() -> None:
    index, allocator = index_of(16)
    kept(index, allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert [len(index.match("model", tokens)) for tokens in (
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9, 9, 9],
        [5, 6, 7, 8], [0, 2, 3, 4], [1, 2, 3], [],
    )] == [2, 2, 1, 1, 0, 0, 0, 0]  # fmt: skip
    assert index.match("another model", [1, 2, 3, 4]) == []
    allocator.check(index.tables[0])
    assert (allocator.num_used, allocator.num_free, allocator.num_idle) == (0, 16, 2)


def test_what_is_kept_already_is_not_kept_twice() -> None:
    index, allocator = index_of(16)
    for tail in ([5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]):
        kept(index, allocator, [1, 2, 3, 4, *tail])
    assert len(index) == 3
    allocator.check(index.tables[0])


def test_the_least_recently_used_gives_way_and_children_before_parents() -> None:
    index, allocator = index_of(6)
    kept(index, allocator, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    kept(index, allocator, [1, 1, 1, 1, 4, 4, 4, 4])
    kept(index, allocator, [9, 9, 9, 9])
    index.match("model", [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    table = BlockTable()
    gone = []
    for blocks in range(1, 7):
        allocator.grow([table], [4])
        allocator.check([table, *index.tables[0]])
        held = {tuple(node.tokens) for node in index._order.values()}
        gone.append(sorted({(n,) * 4 for n in (1, 2, 3, 4, 9)} - held))
        assert len(table.blocks) == blocks
    order = [next(iter(set(now) - set(before)), None) for before, now in zip([[], *gone], gone, strict=False)]
    assert order == [None, (4, 4, 4, 4), (9, 9, 9, 9), (3, 3, 3, 3), (2, 2, 2, 2), (1, 1, 1, 1)]
    assert not index.evict()


def test_a_block_in_use_is_kept_and_not_free() -> None:
    index, allocator = index_of(4)
    kept(index, allocator, [1, 2, 3, 4])
    block = index.match("model", [1, 2, 3, 4])[0].tables[0].blocks[0]
    user = allocator.adopt([block], 4)
    assert (allocator.num_used, allocator.num_idle) == (1, 0)
    index.clear()
    assert user.blocks == [block] and allocator.references(block) == 1
    allocator.check([user])


# With generate() ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "gemma2"])
def test_a_prompt_that_begins_like_another_computes_what_is_new(family: str) -> None:
    model = tiny_model(family)
    prompts = [prompt(5, 1), prompt(20, 2), prompt(5, 1)]
    expected = [generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=10) for ids in prompts]
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=200, prefix_cache=True)
        runs = [prefilled(model, ids, cache, max_new_tokens=10) for ids in prompts]
    assert [computed for _, computed in runs] == [55, 70 - 48, 55 - 48]
    assert all(torch.equal(tokens, other) for (tokens, _), other in zip(runs, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_in_left_padded_batches(options: dict) -> None:
    model = tiny_model("llama")
    alone = [prompt(n, seed) for n, seed in ((5, 1), (33, 2), (17, 5))]
    ids, mask = pad_left([ids[0] for ids in alone])
    options = options | {"max_new_tokens": 8}
    torch.manual_seed(5)
    expected = generate_dynamic(model, ids, mask, **options)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=200, prefix_cache=True)
        generate(model, alone[0], torch.ones_like(alone[0]), cache, max_new_tokens=1)
        torch.manual_seed(5)
        first, computed = prefilled(model, ids, cache, mask, **options)
        assert computed == 83 - 48 and torch.equal(first, expected)
        torch.manual_seed(5)
        again, computed = prefilled(model, ids, cache, mask, **options)
        # the longest row has 80 of its 83 tokens in full blocks, the shortest 48 of 55 at the same place
        assert computed == 83 - min(80, 28 + 48, 16 + 64) and torch.equal(again, expected)


def test_other_caches_on_the_pool_find_it() -> None:
    model = tiny_model("llama")
    ids = prompt(5, 1)
    expected = generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=4)
    pool = BlockPool(num_blocks=60, prefix_cache=True)
    with paged_attention(model):
        for round_ in range(3):
            cache = PagedCache(model.config, pool=pool)
            tokens, computed = prefilled(model, ids, cache, max_new_tokens=4)
            assert torch.equal(tokens, expected) and computed == (7 if round_ else 55)
            del cache
    stats = PagedCache(model.config, pool=pool).stats()
    assert (stats.used_blocks, stats.free_blocks, len(pool.prefixes)) == (0, 60, 3)
    pool.forget_prompts()
    assert len(pool.prefixes) == 0 and pool.allocators[0].num_idle == 0


def test_a_prompt_that_is_whole_in_the_blocks_computes_its_last_token() -> None:
    model = tiny_model("llama")
    ids = prompt(14, 1)  # 64 tokens: four full blocks
    expected = generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=20)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        assert prefilled(model, ids, cache, max_new_tokens=20)[1] == 64
        cache.reset()
        tokens, computed = prefilled(model, ids, cache, max_new_tokens=20)
    assert computed == 1 and torch.equal(tokens, expected)
    # The last token's slot lies in a block that is kept: it was copied before it was written again.
    assert len(cache.pool.prefixes) == 5


def test_a_conversation_computes_each_token_once() -> None:
    model = tiny_model("llama")
    ids = prompt(5, 1)
    fed_tokens = 0
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        for turn in range(10):
            with fed(model) as shapes:
                ids = generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=6)
            fed_tokens += sum(length for _, length in shapes)
            check_books(cache)
            assert fed_tokens == ids.shape[1] - 1
            ids = torch.cat([ids, random_prompts([4], seed=turn)[0]], 1)
    expected = generate_dynamic(model, ids[:, :-4][:, :-6], max_new_tokens=6)
    assert torch.equal(ids[:, :-4], expected)


def test_two_conversations_in_turn_on_one_cache() -> None:
    model = tiny_model("llama")
    talks = [prompt(5, 1), prompt(9, 2)]
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        for turn in range(4):
            for i, ids in enumerate(talks):
                tokens, computed = prefilled(model, ids, cache, max_new_tokens=5)
                assert computed < (60 if turn == 0 else 25)
                more = random_prompts([4], seed=turn + 10 * i)[0]
                with paged_attention(model):
                    talks[i] = torch.cat([tokens, more], 1)
    for ids in talks:
        whole = generate_dynamic(model, ids[:, :-9], max_new_tokens=5)
        assert torch.equal(whole, ids[:, :-4])


def test_new_ids_alone_go_on_from_the_cache() -> None:
    model = tiny_model("llama")
    first, more = prompt(5, 1), random_prompts([6], seed=8)[0]
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        tokens = generate(model, first, torch.ones_like(first), cache, max_new_tokens=5)
        rest = torch.cat([tokens[:, -1:], more], 1)
        mask = torch.ones(1, tokens.shape[1] + 6, dtype=torch.long)
        second = generate(model, rest, mask, cache, max_new_tokens=5)
    expected = generate_dynamic(model, torch.cat([tokens, more], 1), mask, max_new_tokens=5)
    assert torch.equal(second[0, -5:], expected[0, -5:])


# What must not be reused ----------------------------------------------------------------------------------------------


def test_changed_weights_begin_anew() -> None:
    model = build_model("llama")
    ids = prompt(5, 1)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        assert prefilled(model, ids, cache, max_new_tokens=4)[1] == 55
        cache.reset()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        tokens, computed = prefilled(model, ids, cache, max_new_tokens=4)
        assert computed == 55
        cache.reset()
        model.model.layers[0].self_attn.v_proj.weight.data = model.model.layers[0].self_attn.v_proj.weight * 0.5
        assert prefilled(model, ids, cache, max_new_tokens=4)[1] == 55
        cache.reset()
        again, computed = prefilled(model, ids, cache, max_new_tokens=4)
    assert computed == 7 and torch.equal(again, generate_dynamic(model, ids, max_new_tokens=4))
    assert tokens.shape == again.shape


def test_another_model_on_the_pool_begins_anew() -> None:
    one, other = build_model("llama"), build_model("llama", seed=9)
    ids = prompt(5, 1)
    pool = BlockPool(num_blocks=60, prefix_cache=True)
    with paged_attention(one), paged_attention(other):
        assert prefilled(one, ids, PagedCache(one.config, pool=pool), max_new_tokens=4)[1] == 55
        tokens, computed = prefilled(other, ids, PagedCache(other.config, pool=pool), max_new_tokens=4)
        assert computed == 55
        twin = copy.deepcopy(one)
        assert prefilled(twin, ids, PagedCache(one.config, pool=pool), max_new_tokens=4)[1] == 55
        assert prefilled(one, ids, PagedCache(one.config, pool=pool), max_new_tokens=4)[1] == 7
    assert torch.equal(tokens, generate_dynamic(other, ids, max_new_tokens=4))


def test_another_adapter_begins_anew() -> None:
    model = build_model("llama")
    adapter = model.model.layers[1].self_attn.q_proj
    adapter.active_adapters, adapter.disable_adapters, adapter.scaling = ["a"], False, {"a": 1.0}
    ids = prompt(5, 1)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=100, prefix_cache=True)
        computed = []
        for change in ({}, {"active_adapters": ["b"]}, {"disable_adapters": True}, {"scaling": {"a": 2.0}}, {}):
            for name, value in change.items():
                setattr(adapter, name, value)
            cache.reset()
            computed.append(prefilled(model, ids, cache, max_new_tokens=2)[1])
    assert computed == [55, 55, 55, 55, 7]


@pytest.mark.parametrize("what", ["inputs_embeds", "position_ids", "training", "hidden_states", "not enabled"])
def test_what_does_not_follow_from_the_tokens_alone_is_computed(what: str) -> None:
    model = build_model("llama")
    ids = prompt(5, 1)
    mask = torch.ones_like(ids)
    options: dict = {"max_new_tokens": 3}
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        generate(model, ids, mask, cache, max_new_tokens=3)
        cache.reset()
    expected = generate_dynamic(model, ids, mask, max_new_tokens=3)
    lengths = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    if what == "not enabled":
        tokens = generate(model, ids, mask, cache, **options)
    else:
        with paged_attention(model):
            if what == "training":
                model.train()
            if what == "position_ids":
                options["position_ids"] = torch.arange(ids.shape[1])[None]
            if what == "hidden_states":
                options |= {"output_hidden_states": True, "return_dict_in_generate": True}
            if what == "inputs_embeds":
                options["inputs_embeds"] = model.get_input_embeddings()(ids)
                tokens = model.generate(attention_mask=mask, **options, **{CACHE_ARGUMENT: cache}, do_sample=False)
                expected = expected[:, ids.shape[1] :]
            else:
                tokens = generate(model, ids, mask, cache, **options)
    hook.remove()
    model.eval()
    tokens = getattr(tokens, "sequences", tokens)
    assert lengths[0] == 55 and torch.equal(tokens, expected)


@pytest.mark.parametrize("told", ["output_hidden_states", "output_attentions"])
def test_a_prompt_that_is_told_of_is_kept_and_another_may_follow(told: str) -> None:
    model = build_model("llama")
    ids, other = prompt(5, 1), random_prompts([40], seed=2)[0]
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        options = {told: True, "return_dict_in_generate": True, "max_new_tokens": 3}
        # At the first such call transformers hooks the layers for good, which might be what changes keys.
        generate(model, ids, torch.ones_like(ids), PagedCache(model.config), **options)
        output = generate(model, ids, torch.ones_like(ids), cache, **options)
        assert len(output[told.removeprefix("output_")]) == 3
        tokens, computed = prefilled(model, other, cache, max_new_tokens=3)
        assert computed == 40
        assert torch.equal(tokens, generate_dynamic(model, other, torch.ones_like(other), max_new_tokens=3))
        assert prefilled(model, ids, cache, max_new_tokens=3)[1] == 55 - 48


def test_hidden_tokens_are_not_kept() -> None:
    """What a token's keys and values are depends on which tokens before it were seen."""
    model = tiny_model("llama")
    ids = prompt(14, 1)
    mask = torch.ones_like(ids)
    mask[0, 7] = 0  # a hole
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        holed, _ = prefilled(model, ids, cache, mask, max_new_tokens=3)
        tokens, _ = prefilled(model, ids, cache, max_new_tokens=3)
        again, _ = prefilled(model, ids, cache, mask, max_new_tokens=3)
    assert torch.equal(tokens, generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=3))
    assert torch.equal(holed, again)


def fused_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    model.eval()


def write_through_data(model: PreTrainedModel, ids: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def write_through_numpy(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.model.layers[0].self_attn.k_proj.weight.detach().numpy()[:] *= 1.3


def merge_adapter(model: PreTrainedModel, ids: torch.Tensor) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).merge_and_unload()


def steer(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.5)


CHANGES = [fused_step, write_through_data, write_through_numpy, merge_adapter, steer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("between_turns", [False, True])
def test_changes_that_torch_does_not_count(change, between_turns: bool) -> None:
    model = build_model("llama")
    ids = prompt(5, 1)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=100, prefix_cache=True)
        tokens, _ = prefilled(model, ids, cache, max_new_tokens=4)
        if between_turns:
            ids = torch.cat([tokens, random_prompts([6], seed=6)[0]], 1)
        else:
            cache.reset()
        change(model, ids)
        for _ in range(2):  # the second time from what the first kept
            tokens, _ = prefilled(model, ids, cache, max_new_tokens=6)
            assert torch.equal(tokens, model.generate(ids, use_cache=False, max_new_tokens=6, do_sample=False))
            cache.reset()


def test_without_a_mask_padding_is_what_the_models_default_says() -> None:
    model = build_model("llama")
    model.generation_config.pad_token_id = PAD
    ids = random_prompts([40])[0]
    ids[:, :5] = PAD
    config, ones = GenerationConfig(max_new_tokens=6, do_sample=False), torch.ones_like(ids)
    expected = model.generate(ids, generation_config=config)
    pool = BlockPool(num_blocks=200, prefix_cache=True)
    with paged_attention(model):
        for mask in ({"attention_mask": ones}, {}):  # the first keeps them as tokens
            cache = {CACHE_ARGUMENT: PagedCache(model.config, pool=pool)}
            tokens = model.generate(ids, generation_config=config, **mask, **cache)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("drafts", ["lookup", "assistant", "mtp", "config", "positional config", "default"])
def test_drafting_begins_anew_and_keeps_nothing(drafts: str) -> None:
    model = model_with_mtp_layers() if drafts == "mtp" else build_model("llama")
    ids = torch.cat([prompt(5, 1), prompt(5, 1)[:, 20:40]], 1)

    def draft(ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        mask, lookup = torch.ones_like(ids), GenerationConfig(max_new_tokens=10, prompt_lookup_num_tokens=3)
        given = {"attention_mask": mask, CACHE_ARGUMENT: cache}
        match drafts:
            case "lookup":
                return generate(model, ids, mask, cache, max_new_tokens=10, prompt_lookup_num_tokens=3)
            case "assistant":
                return generate(model, ids, mask, cache, max_new_tokens=10, assistant_model=build_model("llama"))
            case "mtp":
                with mtp_layers_at_random():
                    return generate(model, ids, mask, cache, max_new_tokens=10, use_mtp=True)
            case "config":
                return model.generate(ids, generation_config=lookup, **given)
            case "positional config":
                return model.generate(ids, lookup, **given)
        model.generation_config.prompt_lookup_num_tokens = 3
        try:
            return model.generate(ids, GenerationConfig(max_new_tokens=10), **given)
        finally:
            model.generation_config.prompt_lookup_num_tokens = None

    pool = BlockPool(num_blocks=200, prefix_cache=True)
    expected = generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=10)
    more = torch.cat([expected, random_prompts([7], seed=5)[0]], 1)
    more_expected = generate_dynamic(model, more, torch.ones_like(more), max_new_tokens=10)
    with paged_attention(model):
        cache = PagedCache(model.config, pool=pool)
        generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=10)
        for turn, answer in ((ids, expected), (more, more_expected)):
            assert torch.equal(draft(turn, cache), answer)
        tokens = generate(model, more, torch.ones_like(more), PagedCache(model.config, pool=pool), max_new_tokens=10)
    assert torch.equal(tokens, more_expected)


def crop(cache: PagedCache) -> PagedCache:
    cache.crop(-3)
    return cache


def select(cache: PagedCache) -> PagedCache:
    cache.batch_select_indices(torch.tensor([0]))
    return cache


def reorder(cache: PagedCache) -> PagedCache:
    cache.reorder_cache(torch.tensor([0]))
    return cache


def release(cache: PagedCache) -> PagedCache:
    cache.release([0])
    return cache


def roll_back(cache: PagedCache) -> PagedCache:
    cache.rollback()
    return cache


@pytest.mark.parametrize("handle", [crop, select, reorder, release, roll_back, PagedCache.fork, copy.deepcopy])
@pytest.mark.parametrize("same", [False, True])
def test_a_cache_that_was_handled_takes_any_prompt(handle, same: bool) -> None:
    model = tiny_model("llama")
    pool = BlockPool(num_blocks=200, prefix_cache=True)
    with paged_attention(model):
        cache = PagedCache(model.config, pool=pool)
        first = prompt(5, 1)
        tokens = generate(model, first, torch.ones_like(first), cache, max_new_tokens=6)
        ids = (
            torch.cat([tokens[:, :-4], random_prompts([9], seed=3)[0]], 1) if same else random_prompts([80], seed=7)[0]
        )
        handled = handle(cache)
        answers = [
            generate(model, ids, torch.ones_like(ids), one, max_new_tokens=6)
            for one in (handled, PagedCache(model.config, pool=pool))
        ]
    expected = generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=6)
    assert torch.equal(answers[0], expected) and torch.equal(answers[1], expected)


@pytest.mark.parametrize("with_embeddings", [False, True])
def test_rows_begun_by_hand_are_gone_on_from_and_not_kept(with_embeddings: bool) -> None:
    model = tiny_model("llama")
    ids = prompt(14, 1)
    pool = BlockPool(num_blocks=200, prefix_cache=True)
    with paged_attention(model), torch.no_grad():
        cache = PagedCache(model.config, pool=pool)
        begun = model.get_input_embeddings()(ids[:, :32])
        begun = {"inputs_embeds": begun + 1} if with_embeddings else {"input_ids": ids[:, :32]}
        model(**begun, **{CACHE_ARGUMENT: cache})
        tokens = generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=5)
        assert len(pool.prefixes) == 0
        expected = generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=5)
        assert torch.equal(tokens, expected) != with_embeddings
        again = generate(model, ids, torch.ones_like(ids), PagedCache(model.config, pool=pool), max_new_tokens=5)
    assert torch.equal(again, expected)


def test_what_follows_padding_on_the_right_is_not_kept() -> None:
    model = tiny_model("llama")
    ids = torch.cat([prompt(0, 1)[:, :20], torch.zeros(1, 10, dtype=torch.long)], 1)
    mask = (ids != 0).long()
    pool = BlockPool(num_blocks=200, prefix_cache=True)
    with paged_attention(model):
        tokens = generate(model, ids, mask, PagedCache(model.config, pool=pool), max_new_tokens=40)
        alone = torch.cat([ids[:, :20], tokens[:, 30:]], 1)
        answer = generate(model, alone, torch.ones_like(alone), PagedCache(model.config, pool=pool), max_new_tokens=8)
    assert torch.equal(answer, generate_dynamic(model, alone, torch.ones_like(alone), max_new_tokens=8))


# Room and errors ------------------------------------------------------------------------------------------------------


def test_what_is_kept_gives_way_to_new_prompts() -> None:
    model = tiny_model("llama")
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=6, prefix_cache=True)
        for seed in range(5):
            ids = random_prompts([70], seed=seed)[0]
            tokens, computed = prefilled(model, ids, cache, max_new_tokens=20)
            assert computed == 70
            with paged_attention(model):
                assert tokens.shape == (1, 90)
        assert cache.stats().used_blocks <= 6
    assert torch.equal(tokens, generate_dynamic(model, ids, torch.ones_like(ids), max_new_tokens=20))


class Fails(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] > 58:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_that_fails_keeps_nothing_wrong() -> None:
    model = tiny_model("llama")
    ids, other = prompt(5, 1), prompt(7, 2)
    expected = generate_dynamic(model, other, torch.ones_like(other), max_new_tokens=6)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
        generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=2)
        with pytest.raises(KeyboardInterrupt):
            generate(
                model, ids, torch.ones_like(ids), cache, max_new_tokens=9,
                stopping_criteria=StoppingCriteriaList([Fails()]),
            )  # fmt: skip
        check_books(cache)
        tokens, computed = prefilled(model, other, cache, max_new_tokens=6)
    assert computed == 57 - 48 and torch.equal(tokens, expected)


def test_a_cache_of_a_given_pool_takes_the_pools_setting() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="give them to BlockPool"):
        PagedCache(model.config, pool=BlockPool(), prefix_cache=True)
    assert PagedCache(model.config).pool.prefixes is None


def test_the_pool_goes_with_its_last_cache() -> None:
    import gc
    import weakref

    model = tiny_model("llama")
    ids = prompt(5, 1)
    gc.collect()
    gc.disable()
    try:
        with paged_attention(model):
            cache = PagedCache(model.config, num_blocks=60, prefix_cache=True)
            generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=2)
            storage = weakref.ref(next(iter(cache.pool.storages.values())))
            del cache
        assert storage() is None
    finally:
        gc.enable()


def test_suffixes_on_one_prompt_by_hand() -> None:
    model = tiny_model("llama")
    ids = prompt(5, 1)
    tails = [random_prompts([n], seed=n)[0] for n in (3, 8)]
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=60)
        generate(model, ids, torch.ones_like(ids), cache, max_new_tokens=1)
        used = cache.stats().used_blocks
        for twin, tail in zip((cache.fork(), copy.deepcopy(cache)), tails, strict=True):
            whole = torch.cat([ids, tail], 1)
            tokens, computed = generate(model, whole, torch.ones_like(whole), twin, max_new_tokens=4), None
            expected = generate_dynamic(model, whole, torch.ones_like(whole), max_new_tokens=4)
            assert torch.equal(tokens, expected) and computed is None
            assert twin.block_tables["full_attention"][0][:3] == cache.block_tables["full_attention"][0][:3]
            del twin
        assert cache.stats().used_blocks == used
        check_books(cache)


def test_an_encoders_prompt_is_not_a_decoders() -> None:
    from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 199, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    ).eval()
    ids = [random_prompts([40], seed=1)[0], random_prompts([30], seed=2)[0]]
    pool = BlockPool(num_blocks=60, prefix_cache=True)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = [model.generate(input_ids=one, attention_mask=torch.ones_like(one), **options) for one in ids]
    with paged_attention(model):
        for _ in range(2):
            for one, answer in zip(ids, expected, strict=True):
                own = PagedCache(model.config, pool=pool)
                pair = EncoderDecoderCache(own, DynamicCache())
                arguments = {"input_ids": one, "attention_mask": torch.ones_like(one), CACHE_ARGUMENT: pair}
                assert torch.equal(model.generate(**arguments, **options), answer)
                held = own.get_seq_length()
                assert held == 40 and len(pool.prefixes) == 0
                # After a call that failed, too, the pair is left as it is: its halves belong together.
                own.prompts.let_go()
                other = {"input_ids": one[:, :20], "attention_mask": torch.ones_like(one[:, :20])}
                assert begin_kept(model, own, **{**arguments, **other}) is None
                assert own.get_seq_length() == held
