"""The prefix tree as a state machine, against a flat model: each cached block by the tokens that lead to it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tree_keys import key

from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.prefix_tree import PrefixTree

# Two tokens and short runs: prefixes often meet and part.
TOKENS = st.lists(st.integers(0, 1), max_size=14)
SALTS = st.sampled_from(["", "a"])
Path = tuple[str, tuple[int, ...]]


@dataclass
class Holder:
    """A request with its lock, and the tokens up to the lock."""

    node: Node
    salt: str
    tokens: tuple[int, ...]


class PrefixTreeMachine(RuleBasedStateMachine):
    """Requests that lock, extend and release prefixes, while blocks are evicted."""

    @initialize(block_size=st.integers(1, 2))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.tree = PrefixTree(block_size)
        self.cached: dict[Path, int] = {}
        self.last_used: dict[Path, int] = {}
        self.holders: list[Holder] = []
        self.blocks = 0
        self.now = 0

    def whole(self, tokens: list[int]) -> tuple[int, ...]:
        return tuple(tokens[: len(tokens) // self.size * self.size])

    def path(self, salt: str, tokens: tuple[int, ...]) -> list[Path]:
        return [(salt, tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def longest(self, salt: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for path in self.path(salt, tokens):
            if path not in self.cached:
                break
            found = path[1]
        return found

    def locked(self) -> set[Path]:
        return {path for holder in self.holders for path in self.path(holder.salt, holder.tokens)}

    @rule(salt=SALTS, tokens=TOKENS)
    def peek(self, salt: str, tokens: list[int]) -> None:
        asked = self.whole(tokens)
        assert self.tree.peek(salt, key(asked)) == len(self.longest(salt, asked))

    @rule(salt=SALTS, tokens=TOKENS)
    def acquire(self, salt: str, tokens: list[int]) -> None:
        found = self.longest(salt, self.whole(tokens))
        node, blocks = self.tree.lock(self.tree.find(salt, key(self.whole(tokens))))
        assert blocks == [self.cached[path] for path in self.path(salt, found)]
        self.holders.append(Holder(node, salt, found))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), tokens=TOKENS)
    def extend(self, which: int, tokens: list[int]) -> None:
        holder = self.holders[which % len(self.holders)]
        run = self.whole(tokens)
        own = list(range(self.blocks, self.blocks + len(run) // self.size))
        self.blocks += len(own)
        whole = holder.tokens + run
        known = len(self.longest(holder.salt, whole)) - len(holder.tokens)
        holder.node, present = self.tree.extend(holder.node, key(run), own)
        holder.tokens = whole
        assert present * self.size == known
        new = self.path(holder.salt, whole)[len(whole) // self.size - len(own) :][present:]
        self.cached.update(zip(new, own[present:], strict=True))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        self.tree.release(holder.node)
        self.now += 1
        self.last_used.update(dict.fromkeys(self.path(holder.salt, holder.tokens), self.now))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        free = self.cached.keys() - self.locked()
        taken = self.tree.evict(count)
        assert len(taken) == min(count, len(free))
        assert len(taken) == len(set(taken))
        paths = {block: path for path, block in self.cached.items()}
        gone = {paths[block] for block in taken}
        assert gone <= free
        for path in gone:
            del self.cached[path]
        # All remaining blocks can be reached, ...
        assert all(
            len(tokens) == self.size or (salt, tokens[: -self.size]) in self.cached for salt, tokens in self.cached
        )
        # ... and the evicted ones were used before all remaining ones without a successor.
        followed = {(salt, tokens[: -self.size]) for salt, tokens in self.cached}
        ends = [path for path in self.cached.keys() - self.locked() if path not in followed]
        if gone and ends:
            assert max(self.last_used[path] for path in gone) <= min(self.last_used[path] for path in ends)

    @invariant()
    def the_counts_are_exact(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.tree.cached_blocks == len(self.cached)
        assert self.tree.evictable_blocks == len(self.cached.keys() - self.locked())

    def teardown(self) -> None:
        """Release all locks: each block of the tree is evicted once."""
        if not hasattr(self, "tree"):
            return
        for holder in self.holders:
            self.tree.release(holder.node)
        assert sorted(self.tree.evict(self.tree.cached_blocks)) == sorted(self.cached.values())
        assert (self.tree.cached_blocks, self.tree.evictable_blocks) == (0, 0)
        assert self.tree.evict(1) == []


TestPrefixTree = PrefixTreeMachine.TestCase
TestPrefixTree.settings = settings(stateful_step_count=60)
