"""Prompts that are kept: full blocks, found again by the tokens in them and before them.

A tree of blocks: a node is one full block, reached from its parent by the tokens that it holds. Looking one up compares
the tokens themselves, so that two prompts are never taken for one another. The blocks are parked: they count as free,
and the least recently used give way when others need them. The idea of an index of blocks by their contents is that of
vLLM's automatic prefix caching and SGLang's RadixAttention (arXiv 2312.07104).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from hf_paged.allocator import BlockAllocator, BlockTable


class Node:
    """One full block of every group of layers, after those of its ancestors."""

    __slots__ = ("children", "parent", "tables", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], tables: list[BlockTable]) -> None:
        self.parent, self.tokens, self.tables = parent, tokens, tables
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixIndex:
    """The kept blocks of a pool. Whoever calls has the pool's lock.

    Args:
        allocators: of the pool, one for each group of layers.
        block_size: tokens per block.
    """

    def __init__(self, allocators: list[BlockAllocator], block_size: int) -> None:
        self._allocators, self._size = allocators, block_size
        self._roots: dict[Hashable, Node] = {}
        # Least recently used first. Whoever uses a node uses its ancestors after it, so children come before parents.
        self._order: OrderedDict[int, Node] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are kept, in each group."""
        return len(self._order)

    @property
    def tables(self) -> list[list[BlockTable]]:
        """By group, what the index holds."""
        return [[node.tables[group] for node in self._order.values()] for group in range(len(self._allocators))]

    def match(self, key: Hashable, tokens: Sequence[int]) -> list[Node]:
        """The longest chain of kept blocks that begins as `tokens` do.

        Args:
            key: what keys and values depend on besides the tokens: the model and its weights.
        """
        node, chain = self._roots.get(key), []
        for start in range(0, len(tokens) - self._size + 1, self._size):
            node = node and node.children.get(tuple(tokens[start : start + self._size]))
            if node is None:
                break
            chain.append(node)
        self._use(chain)
        return chain

    def insert(self, key: Hashable, tokens: Sequence[int], tables: Sequence[BlockTable]) -> None:
        """Keep the full blocks of a sequence.

        Args:
            tokens: what the sequence holds, from its beginning.
            tables: its block table in each group.
        """
        if key not in self._roots:
            self._roots = {key: root for key, root in self._roots.items() if root.children}
            self._roots[key] = Node(None, (), [])
        node, chain = self._roots[key], []
        for start in range(0, len(tokens) - self._size + 1, self._size):
            chunk = tuple(tokens[start : start + self._size])
            child = node.children.get(chunk)
            if child is None:
                entry = start // self._size
                kept = []
                for allocator, table in zip(self._allocators, tables, strict=True):
                    kept.append(allocator.adopt(table.blocks[entry : entry + 1], self._size))
                    allocator.park(kept[-1])
                child = node.children[chunk] = Node(node, chunk, kept)
            chain.append(child)
            node = child
        self._use(chain)

    def evict(self) -> bool:
        """Give up the least recently used block; False if none is kept."""
        if not self._order:
            return False
        _, node = self._order.popitem(last=False)
        for allocator, table in zip(self._allocators, node.tables, strict=True):
            allocator.release(table)
        node.parent.children.pop(node.tokens)
        return True

    def clear(self) -> None:
        """Give up all."""
        while self.evict():
            pass

    def _use(self, chain: list[Node]) -> None:
        for node in reversed(chain):
            self._order[id(node)] = node
            self._order.move_to_end(id(node))
