"""PagedCache: transformers' `Cache` interface over a block pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache

from hf_paged.compiled_steps import CompiledSteps
from hf_paged.host import on_the_host
from hf_paged.hybrid_layer import HybridPagedLayer
from hf_paged.kept_prompts import KeptPrompts
from hf_paged.layer import PagedLayer, allocate
from hf_paged.layer_kinds import HYBRID_KINDS, group_layers, is_recurrent, layer_kinds
from hf_paged.plan import StepPlan
from hf_paged.pool import BlockPool
from hf_paged.rows import Rows
from hf_paged.stats import CacheStats, collect_stats

_ADVICE_FOR_PAIRS = (
    "this is an encoder-decoder model, whose layers store keys of two kinds: if the cache was passed as it is, pass "
    "EncoderDecoderCache(PagedCache(model.config), DynamicCache()) instead. If not, "
)
_CROPS_TO_A_LENGTH = Version(transformers.__version__) < Version("5.18")


class CachedLength(int):
    """A padded length that knows its cache, weakly. transformers hands it on to the mask function, which so learns
    for which cache and layer a mask is made."""

    cache: weakref.ref[PagedCache]
    layer: int


class PagedCache(Cache):
    """A KV cache whose memory is a pool of fixed-size blocks that are taken as tokens come.

    Works wherever transformers takes a cache: `model.generate(**inputs, past_key_values=PagedCache(model.config))`.
    After `enable_paged_attention(model)` the attention kernel reads the blocks themselves and padding is not stored;
    without it, every layer is handed dense tensors gathered from the blocks.

    Args:
        config: the model's config; it says which layers there are.
        block_size: tokens per block, a power of two from 1 to 256; 16 by default. Change it with a benchmark only.
        num_blocks: blocks in the pool.
        max_memory: instead of `num_blocks`: bytes, `"4GiB"`, or a fraction of the memory free at first use. Without
            either, half of that; see `BlockPool`.
        prefix_cache: with an enabled model, keep the full blocks of prompts and answers in the pool, so that a
            generate() call that begins with the same tokens computes only what is new. Such a cache takes other
            prompts, too: where its rows came from generate() calls and a prompt does not go on from them, it begins
            new ones. See `BlockPool`.
        pool: a pool to share with other caches of the same model. Excludes the four arguments above.

    Raises:
        ValueError: an argument out of range.
        NotImplementedError: the model has layers of a kind that cannot be paged; the message names it.

    Copying a cache (`copy.deepcopy`, `fork`) shares its blocks; a block is copied only when one side writes to it.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_memory: int | float | str | None = None,
        prefix_cache: bool | None = None,
        pool: BlockPool | None = None,
    ) -> None:
        if config is None:
            raise ValueError("PagedCache needs the model's config to know its layers: PagedCache(model.config)")
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a transformers config, such as model.config, not {type(config).__name__}")
        pool = BlockPool.given_or_new(
            pool, block_size=block_size, num_blocks=num_blocks, max_memory=max_memory, prefix_cache=prefix_cache
        )
        kinds, kwargs = layer_kinds(config)
        groups = group_layers(kinds, kwargs)
        if not groups:
            raise NotImplementedError(
                f"{config.model_type} has no attention layers, so there is nothing to page; use transformers' own cache"
            )
        pool.bind(groups)
        has_state = any(map(is_recurrent, kinds))
        rows = Rows(pool, len(kinds), has_state)
        if getattr(config, "is_encoder_decoder", False):
            rows.advice = _ADVICE_FOR_PAIRS
        self._attach(rows, kinds, kwargs)

    def _attach(self, rows: Rows, kinds: Sequence[str], kwargs: Sequence[dict]) -> None:
        self._rows = rows
        self._kinds, self._kwargs = list(kinds), list(kwargs)
        self._in_pass = False
        self.after_pass: Callable[[], object] | None = None
        """Called once at the end of a forward pass."""
        self._ended: torch.Tensor | None = None
        group_of = {layer: number for number, group in enumerate(rows.pool.groups) for layer in group.layers}
        layers: list[Any] = []
        for index, (kind, options) in enumerate(zip(kinds, kwargs, strict=True)):
            if kind in HYBRID_KINDS:
                layers.append(HybridPagedLayer(rows, index, group_of[index], **options))
            elif index in group_of:
                layers.append(PagedLayer(rows, index, group_of[index]))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**options))
        super().__init__(layers=layers)
        self._ref = weakref.ref(self)
        self.compiled = CompiledSteps(self._ref, rows, self.layers)
        """For `hf_paged.patches.compiled`."""
        self.prompts = KeptPrompts(rows)
        """For `hf_paged.patches.prompts`."""

    # What transformers calls -------------------------------------------------------------------------------------

    # What follows runs on the host between the layers: under torch.compile the graph breaks around it.
    @on_the_host
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of one layer; see `PagedLayer.update`."""
        try:
            layer = self.layers[layer_idx]
        except IndexError:
            self._rows.undo_open()
            raise ValueError(
                f"layer {layer_idx} was updated, but this cache was made for {len(self.layers)} layers; "
                "make it from the config of the model that uses it"
            ) from None
        return layer.update(key_states, value_states, *args, **kwargs)

    @on_the_host
    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The padded length; as `CachedLength`, so that the mask function knows whose it is."""
        length = CachedLength(self.get_seq_length(layer_idx))
        length.cache, length.layer = self._ref, layer_idx
        return length

    @property
    def batch_size(self) -> int:
        """Rows in the cache, -1 before the first step."""
        return self._rows.num_rows or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions of every row; their blocks are freed unless shared.

        Up to transformers 5.17 a positive number is the length to crop to, as there.

        Raises:
            ValueError: a positive number from transformers 5.18 on, or tokens that have left a sliding window would be
                needed again. What the last forward pass added can always be removed.
            RuntimeError: the model has recurrent states, which have not been told to keep their past.
        """
        length = self.get_seq_length()
        if tokens_to_remove > 0:
            if not _CROPS_TO_A_LENGTH:
                raise ValueError(
                    f"crop({tokens_to_remove}): pass the number of tokens to remove, negative, as in crop(-1)"
                )
            tokens_to_remove = min(tokens_to_remove - length, 0)
        for layer in self._state_layers():  # first, since these may refuse
            layer.crop(tokens_to_remove)
        if tokens_to_remove:
            self._rows.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Give every block back and forget the rows. The pool stays as it is."""
        self._rows.reset()
        for layer in self._state_layers():
            layer.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was. Only tables move; blocks are shared, and freed when no row is
        left that holds them."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows that share its blocks."""
        self._select([row for row in range(self._rows.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order; a bool tensor keeps the rows where it is True."""
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist() if isinstance(indices, torch.Tensor) else list(indices))

    def _select(self, indices: list[int]) -> None:
        num_rows = self._rows.num_rows
        self._rows.select(indices)
        if num_rows:
            picked = torch.tensor([index % num_rows for index in indices], dtype=torch.long)
            for layer in self._state_layers():
                layer.reorder_cache(picked)  # repeats and leaves out rows, too

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        for layer in self.layers:
            window = getattr(layer, "window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    def __repr__(self) -> str:
        stats = self.stats()
        total = f"{stats.total_blocks:,}" if stats.total_blocks else "as many as fit"
        return (
            f"PagedCache(rows={self._rows.num_rows}, length={self._rows.length}, tokens={stats.tokens:,}, "
            f"blocks={stats.used_blocks:,} of {total}, block_size={stats.block_size})"
        )

    # What users call ---------------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The pool that the blocks come from."""
        return self._rows.pool

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pool.block_size

    @property
    def block_tables(self) -> dict[str, list[list[int]]]:
        """The physical blocks of each row, in order: one list of rows for each group of layers, by its name, such as
        `full_attention` or `sliding_attention(128)`. Most models have one group. Under a sliding window, the blocks
        that are still held."""
        return {
            group.name: [list(table.blocks) for table in tables]
            for group, tables in zip(self.pool.groups, self._rows.tables or [[]] * len(self.pool.groups), strict=True)
        }

    @property
    def row_lengths(self) -> list[int]:
        """Tokens stored in each row, padding not counted."""
        return self._rows.stored_lens.tolist()

    def stats(self) -> CacheStats:
        """Blocks, tokens and bytes as they are now; reserved, in use and tokens are told apart."""
        return collect_stats(self._rows)

    def release(self, rows: Sequence[int]) -> None:
        """Give the blocks of these rows back at once. The rows stay in the batch, empty, and store nothing more while
        this generation goes on."""
        self._rows.release([int(row) for row in rows])

    def fork(self, rows: Sequence[int] | None = None) -> PagedCache:
        """A cache of its own that continues from the same tokens and shares every block of them.

        Args:
            rows: rows of this cache to take, in this order, repeats allowed; all by default.

        Raises:
            NotImplementedError: `rows` is given and the model has recurrent layers, whose state cannot be shared.
        """
        if rows is not None and any(self._state_layers()):
            raise NotImplementedError("fork(rows) cannot take rows of recurrent state layers; fork() copies them")
        return self._copy(self._rows.fork(rows), {})

    def rollback(self) -> None:
        """Undo the last forward pass, if nothing else was done to the cache since.

        The recurrent state of linear attention layers cannot be undone: the cache of a model that has such layers then
        refuses to go on until `reset()`.
        """
        self._rows.undo()

    def __deepcopy__(self, memo: dict) -> PagedCache:
        twin = self._copy(self._rows.fork(), memo)
        memo[id(self)] = twin
        return twin

    __copy__ = fork

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedCache cannot be pickled: its blocks belong to a pool in this process. Pass the token ids and fill "
            "a cache on the other side"
        )

    def _repr_html_(self) -> str:
        from hf_paged.pictures.html import html_of_cache

        return html_of_cache(self)

    # What compiled decode steps call, see hf_paged.patches.compiled; more of it is in `compiled` ----------------------

    @property
    def is_compileable(self) -> bool:
        """True where generate() of a model with paged attention enabled asks. Elsewhere a graph would be handed tensors
        that grow with every token, and so compile anew for each."""
        return self.compiled.are_asked_for

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass has begun that has not ended."""
        return self._in_pass

    @property
    def has_padding(self) -> bool:
        """Whether some position of the rows holds no token."""
        return self._rows.has_holes

    def begin_extended(self, num_rows: int) -> StepPlan:
        """Begin a step of one token a row whose mask is that of the step before and a 1 in every row, and whose layers'
        masks mean the same as then."""
        step = self.begin_step(num_rows, 1, None, extends=True)
        step.plain_groups = set(range(len(self.pool.groups)))
        return step

    def graph_has_run(self) -> None:
        """Note that a compiled graph has stored the step's tokens in every layer."""
        self._rows.lengths = [self._rows.step.end] * len(self.layers)

    def note_changed_keys(self) -> None:
        """Note that a model was seen to change keys after an update, and undo the step: layers are handed dense tensors
        from now on."""
        self._rows.always_dense = True
        self.leave_pass(failed=True)

    # What the attention path calls --------------------------------------------------------------------------------

    def begin_step(
        self, num_rows: int, q_len: int, attention_mask: torch.Tensor | None, *, extends: bool = False
    ) -> StepPlan:
        """Plan a forward pass whose padding mask is known, and allocate its blocks if the pool has been sized.

        A second call for the same pass (models with several kinds of layers make several masks) gives the same plan.

        Args:
            attention_mask: `[num_rows, length + q_len]` bool, or None.
            extends: instead of passing the mask: it is that of the step before, and a 1 for what is new.

        Raises:
            OutOfBlocksError, ValueError, RuntimeError: as `Rows.begin` and `Rows.allocate`.
        """
        mask = None if attention_mask is None else attention_mask.detach().cpu().numpy()
        self._read_ended()
        rows = self._rows
        step = rows.step
        if (
            step is not None
            and step.sees_mask
            and not step.closed
            and step.q_len == q_len
            and len(step.context_lens) == num_rows
            and not any(length == step.end for length in rows.lengths)
            and (
                (mask is None) == (step.mask is None)
                # The text model within Molmo 2 gets what the mask function gave to the outer one: None, and the plan
                # knows the padding.
                or (mask is None and self._in_pass)
            )
            and (mask is None or np.array_equal(mask, step.mask))
        ):
            return step
        step = rows.begin(num_rows, q_len, mask, sees_mask=True, extends=extends)
        if self.pool.is_sized:
            allocate(rows, step)
        else:
            rows.step = step
        return step

    def stored_positions(self, step: StepPlan) -> np.ndarray | None:
        """`[rows, length]` bool: which padded positions have a token in the blocks once `step` is written; None for all
        of them."""
        return self._rows.stored_positions(step)

    def enter_pass(self) -> None:
        """A forward pass begins whose end will be told by `leave_pass`."""
        if self._in_pass:  # the one before was interrupted in a way that no hook is told of
            self.leave_pass(failed=True)
        self._close_step()
        self._in_pass = True

    def leave_pass(self, *, failed: bool) -> None:
        """A forward pass has ended; if it failed, the cache is put back to what it was before."""
        if not self._in_pass:
            return  # what failed was something else, and the step of a pass that nobody watched is complete
        self._in_pass = False
        if self.after_pass is not None:
            after, self.after_pass = self.after_pass, None
            after()
        if failed:
            self._rows.undo_open()
        else:
            self._close_step()

    def _close_step(self) -> None:
        step = self._rows.step
        if step is not None and not step.closed:
            self._rows.settle()
            step.closed = True
            step.forget_masks()

    def mark_finished(self, done: torch.Tensor) -> None:
        """Note that rows have ended, `[rows]` bool; once their last token is fed they store nothing more, and their
        blocks may be taken when others need them."""
        rows = self._rows
        # Without our mask function (another implementation was set meanwhile) every position must be stored.
        if len(done) != rows.num_rows or rows.step is None or not rows.step.sees_mask:
            return
        if done.device.type == "cuda":
            # It is read when the next step begins: generate() has waited for the device by then.
            self._ended = torch.empty(done.shape, dtype=done.dtype, device="cpu", pin_memory=True).copy_(
                done, non_blocking=True
            )
            self._ended_event = torch.cuda.Event()
            self._ended_event.record(torch.cuda.current_stream(done.device))
        else:
            rows.mark_finished(done.cpu().numpy())

    def _read_ended(self) -> None:
        if self._ended is not None:
            self._ended_event.synchronize()
            ended, self._ended = self._ended.numpy(), None
            if len(ended) == self._rows.num_rows:
                self._rows.mark_finished(ended)

    def clear_finished(self) -> None:
        """Let every row store again."""
        self._ended = None
        self._rows.clear_finished()

    def _state_layers(self) -> Iterator[Any]:
        """transformers' own layers, which hold recurrent states, by themselves or beside attention."""
        for layer in self.layers:
            if isinstance(layer, HybridPagedLayer):
                yield layer.state
            elif not isinstance(layer, PagedLayer):
                yield layer

    def _copy(self, rows: Rows, memo: dict) -> PagedCache:
        import copy

        twin = type(self).__new__(type(self))
        twin._attach(rows, self._kinds, self._kwargs)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer):
                new = twin.layers[index]
                new.storage, new.backend, new.hands_over = layer.storage, layer.backend, layer.hands_over
                new._nan = layer._nan
                if isinstance(layer, HybridPagedLayer):
                    new.state = copy.deepcopy(layer.state, memo)
            else:
                twin.layers[index] = copy.deepcopy(layer, memo)
        return twin
