"""KVCache: the KV blocks of one replica, and the block tables of its sequences.

A block is free, owned by the prefix tree, or owned by one sequence. Blocks of the tree that no sequence uses count as
available: they are evicted, least recently used first, when the free ones run out. Beside states, the blocks of a sequence that found
a prefix stay longer, until as many others as it found are evicted: by last use alone, each session would lose its last blocks, and with
them its checkpoint, before its next turn where more are active than blocks.

These are the blocks of the first group, which is full. The pools of the further groups follow their own rules: see `window_pool` and
`state_pool`. A sequence gets their blocks chunk by chunk, and gives back those that it no longer needs. A prompt is placed if each of
them has room for what it holds at its end, beside what the prompts under way may still need.

A sequence gets the blocks of its prompt and a few for growth, not for its maximum length. Once fewer than LOW_ROOM positions are free it
is due for more blocks. Below URGENT_ROOM it is served at the next step boundary, with all others that are due. Where a step may compute
drafted tokens, all of these are larger by ROOM_STEPS of its longest draft: a draft without room is cut.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from text_generation_router.request import RequestId
from text_generation_router.scheduling.checkpoints import StateCheckpoint, checkpoints, turn_blocks
from text_generation_router.scheduling.chunking import MIN_SHARED_TOKENS, PendingPrompts
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.keys import TOKEN_BYTES
from text_generation_router.scheduling.messages import Allocations, FurtherBlocks, ReplicaSpec
from text_generation_router.scheduling.prefix_node import Prefix
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.sequence import ScheduledSequence, State
from text_generation_router.scheduling.state_pool import StatePool
from text_generation_router.scheduling.window_pool import WindowPool, number_of

LOW_ROOM = 24
URGENT_ROOM = 8
"""Free positions of a sequence."""
ROOM_STEPS = 2


class KVCache:
    """The KV blocks of one replica, with a prefix cache."""

    def __init__(self, spec: ReplicaSpec, host: HostCache | None = None, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks = spec.num_blocks
        self.block_size = block_size = spec.block_size
        groups = spec.further_groups
        self.pools = tuple(WindowPool(group, block_size) for group in groups if not group.is_state)
        """The KV blocks of the groups after the first."""
        self.states = next((StatePool(group, block_size) for group in groups if group.is_state), None)
        """The states; they come after these groups."""
        self.further_pools = self.pools if self.states is None else (*self.pools, self.states)
        self.tree = PrefixTree(block_size, self.further_pools)
        self.host = host if prefix_caching else None
        """None if there is no host cache."""
        self.urgent = False
        """True if a sequence needs blocks at the next step boundary."""
        self.draft_room = ROOM_STEPS * (spec.tokens_per_step - 1)
        """Positions for drafts."""
        self.low_room, self.urgent_room = LOW_ROOM + self.draft_room, URGENT_ROOM + self.draft_room
        self.caching = prefix_caching
        """False: no cached prefix is reused, and none is kept."""
        self._block_bytes = block_size * TOKEN_BYTES
        # Last in, first out: a block freed just now is likely still in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._growing: dict[RequestId, ScheduledSequence] = {}
        """Running sequences with little room."""

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and evictable ones."""
        return len(self._free) + self.tree.evictable_blocks

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    @property
    def usage(self) -> dict[str, tuple[int, int]]:
        """The blocks in use, and all, by the name of each group."""
        usage = {"full": (self.used, self.num_blocks)}
        for pool in self.further_pools:
            usage[pool.group.name] = pool.used, pool.group.num_blocks
        return usage

    def cached_tokens(self, sequence: ScheduledSequence) -> int:
        """Return the leading tokens of `sequence` that are cached. At least one token is left to compute."""
        tokens = self.tokens_on_device(sequence)
        if (host := self.host_of(sequence)) is not None:
            key, tree = self.reusable_key(sequence), host.tree
            if tree.match(sequence.salt, key).blocks * self.block_size > tokens:
                # Of two replicas, that without a load is the better one.
                tokens = max(tokens, tree.peek(sequence.salt, key) * 15 // 16)
        return tokens

    def host_of(self, sequence: ScheduledSequence) -> HostCache | None:
        """Return the host cache, if there is one for `sequence`.

        Its request may do without, and replicas may have loaded its adapter from other files, unless it was there from the start.
        """
        without = sequence.request.without
        return None if sequence.version or "offload" in without or "prefix" in without else self.host

    def tokens_on_device(self, sequence: ScheduledSequence) -> int:
        """Do as `cached_tokens`, without the host cache."""
        return self.tree.peek(sequence.salt, self.reusable_key(sequence))

    def lock_prefix(self, sequence: ScheduledSequence, prefix: Prefix, loaded: int = 0) -> None:
        """Give `sequence` the blocks of its cached prefix; `loaded`: blocks of the longer one that is to be loaded, or 0."""
        sequence.prefix_lock, sequence.blocks = lock, _ = self.tree.lock(prefix)
        count, is_loaded, request = loaded or prefix.blocks, loaded > 0, sequence.request
        sequence.cached_tokens = tokens = count * self.block_size
        if self.pools:
            sequence.further = [
                pool.hold(blocks, count, sequence.length, loaded=is_loaded)
                for pool, blocks in zip(self.pools, prefix.further, strict=False)
            ]
        if self.states is not None:
            size, turn_ends, wanted = self.block_size, request.turn_ends, list[StateCheckpoint]()
            if self.caching and "prefix" not in request.without:
                wanted = checkpoints(sequence.length, turn_ends, prefix.branch * size, tokens, size)
            returns = count in turn_blocks(turn_ends, sequence.length, size)
            sequence.states = self.states.start(prefix.further[-1], wanted, tokens * is_loaded, returns=returns)
        sequence.committed_blocks = prefix.blocks
        sequence.own_cached_tokens = self.tree.known_blocks(lock, request.qos.tenant) * self.block_size

    def will_share(self, leader: ScheduledSequence, tokens: int) -> bool:
        """Return True if others can continue after about `tokens` tokens of `leader`, a prompt under way, once these are computed.

        A sequence with states is asked to leave a checkpoint there.
        """
        states, first = leader.states, tokens - MIN_SHARED_TOKENS + 1
        if states is None or states.leaves_within(first, tokens, self.block_size):
            return True
        if not leader.num_scheduled_tokens < tokens < leader.prefill_length:
            return False
        states.leave(tokens)
        return True

    def has_room(
        self,
        sequence: ScheduledSequence,
        prefix: Prefix,
        tokens: int,
        margins: tuple[int, int],
        prompts: PendingPrompts,
    ) -> bool:
        """Return True if there are blocks for `tokens` tokens of `sequence` beside its cached prefix, and `margins` more.

        The margins are those of the first group and of the others.

        The groups after the first have room for the prompts under way, too, and for a chunk of the oldest: it would crawl, block by
        block, if others took what it gives back.
        """
        if self.blocks_for(tokens) - prefix.blocks + margins[0] > self.available - prefix.evictable_blocks:
            return False
        if self.states is not None and not self.states.has_room(prefix.further[-1]):
            return False
        for number, pool in enumerate(self.pools):
            room = pool.available - margins[1]
            # Usually there is far more than all may want.
            if room < (len(prompts) + 2) * pool.most_due + prompts.blocks_kept:
                chunk = prompts.blocks_kept
                for each in prompts:
                    held = each.further[number]
                    room -= pool.due(held.first, len(held.blocks), each.length, chunk)
                    chunk = 0
                reused = prefix.further[number]
                room -= sum(1 for block in reused if not block.holders)
                if room < pool.due(prefix.blocks - len(reused), len(reused), sequence.length):
                    return False
        return True

    def is_scarce(self, blocks: int) -> bool:
        """Return True if a group has fewer than `blocks` blocks available."""
        return self.available < blocks or any(pool.available < blocks for pool in self.pools)

    def may_limit_prompts(self, spare: int, budget: int, growth_tokens: int, prompts: int) -> bool:
        """Return True if a group after the first may lack blocks for `budget` tokens of prompts, with `spare` blocks left.

        Chunks of sequences with states also end at the second checkpoint that is to be left.
        """
        blocks = spare + budget // self.block_size + prompts * (growth_tokens // self.block_size + 3)
        return self.states is not None or (bool(self.pools) and self.is_scarce(blocks))

    def reach(self, sequence: ScheduledSequence, running: int) -> int:
        """Return the prompt tokens of `sequence` that can be scheduled with the blocks that it has or may get."""
        ends = [
            held.end + max(-(-pool.available // 2), pool.available - running)
            for pool, held in zip(self.pools, sequence.further, strict=True)
        ]
        end = min([len(sequence.blocks), *ends]) * self.block_size
        if sequence.states is not None and len(sequence.states.wanted) > 1:
            end = min(end, sequence.states.wanted[-2].position)
        return end - sequence.num_scheduled_tokens

    def starved(self, prompts: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return those of `prompts` that have tokens to schedule, no block for one, and no chunk under way."""
        if not self.pools or not self.is_scarce(1):
            return []
        idle = (each for each in prompts if each.may_be_idle)
        return [each for each in idle if each.unscheduled_tokens and self.reach(each, 0) <= 0]

    def extend(self, sequence: ScheduledSequence, end: int, allocations: Sequence[Allocations]) -> None:
        """Give `sequence` the blocks of the groups after the first up to block `end`, and add them to `allocations`.

        They must be available.
        """
        for pool, held, allocated in zip(self.pools, sequence.further, allocations[1:], strict=False):
            if blocks := pool.extend(held, end):
                allocated.append((sequence.slot, blocks))
            if (capacity := held.end * self.block_size) < sequence.capacity:
                sequence.capacity = capacity

    def chunk_scheduled(
        self, sequence: ScheduledSequence, growth_tokens: int, spare: int | None, allocations: Sequence[Allocations]
    ) -> None:
        """Give `sequence` the blocks of its scheduled chunk; with the last one, those for growth if `spare` more are left.

        `spare` None: there are enough. The placement of a sequence that was not sent yet has its blocks, which are then not added to
        `allocations`, but for those of states after its first one.
        """
        if self.pools:
            end = self.blocks_for(sequence.num_scheduled_tokens)
            if not sequence.unscheduled_tokens:
                grown = self.blocks_for(min(sequence.length + growth_tokens + self.draft_room, sequence.max_length))
                end = grown if spare is None or self._has_blocks(sequence, grown, spare) else end
            sequence.capacity = len(sequence.blocks) * self.block_size
            self.extend(sequence, end, self.no_allocations() if sequence.state is State.PLACED else allocations)
        if self.states is not None and sequence.states is not None:
            new = self.states.chunk_scheduled(sequence.states, sequence.num_scheduled_tokens)
            allocations[-1].extend((sequence.slot, each) for each in new)
        if not sequence.unscheduled_tokens:
            self.check_room(sequence)

    def _has_blocks(self, sequence: ScheduledSequence, end: int, spare: int) -> bool:
        """Return True if each group has the blocks of `sequence` up to block `end`, and `spare` more."""
        wanted = end - len(sequence.blocks)
        return (wanted <= 0 or wanted + spare <= self.available) and all(
            end <= held.end or end - held.end + spare <= pool.available
            for pool, held in zip(self.pools, sequence.further, strict=True)
        )

    def further_blocks(self, sequence: ScheduledSequence) -> tuple[FurtherBlocks, ...]:
        """Return the blocks of a sequence in the groups after the first."""
        blocks = [(held.first, tuple(map(number_of, held.blocks))) for held in sequence.further]
        if (states := sequence.states) is not None:
            # Its first chunk may be scheduled, and leave checkpoints.
            own = next(iter(states.kept.values()), states.current)
            blocks.append((0, tuple(map(number_of, (*states.source, own)))))
        return tuple(blocks)

    def give_back(self, sequence: ScheduledSequence) -> None:
        """Drop the blocks that `sequence` no longer needs."""
        position = sequence.num_kv_tokens
        for pool, held in zip(self.pools, sequence.further, strict=True):
            if position >= held.needed_until:
                pool.give_back(held, position)
        if self.states is not None and sequence.states is not None and position > sequence.cached_tokens:
            self.states.settle(sequence.states, position)

    def allocate(self, sequence: ScheduledSequence, count: int) -> list[int]:
        """Give `sequence` `count` more blocks of the first group and return them. They must be available."""
        free = self._free
        self._make_free(count)
        assert 0 <= count <= len(free), "more blocks allocated than are free"
        blocks = [free.pop() for _ in range(count)]
        sequence.blocks += blocks
        sequence.capacity = len(sequence.blocks) * self.block_size
        return blocks

    def commit(self, sequence: ScheduledSequence, computed: int) -> None:
        """Move the full blocks of the first `computed` tokens, whose KV is computed, to the prefix tree."""
        # A self-scheduling engine may have computed more than the blocks planned for it here hold.
        full, known = min(computed // self.block_size, len(sequence.blocks)), sequence.committed_blocks
        if not self.caching or sequence.prefix_lock is None or "prefix" in sequence.request.without:
            return
        tenant = sequence.request.qos.tenant
        if full <= known:
            self.tree.claim(sequence.prefix_lock, tenant)
            return
        in_prompt = full * self._block_bytes <= len(sequence.prompt_key)
        key = sequence.prompt_key if in_prompt else sequence.key
        run = sequence.blocks[known:full]
        sequence.prefix_lock, duplicates = self.tree.extend(
            sequence.prefix_lock,
            key[known * self._block_bytes : full * self._block_bytes],
            run,
            tenant,
            [held.between(known, full) for held in sequence.further_held] if self.further_pools else (),
        )
        self.tree.claim(sequence.prefix_lock, tenant)
        sequence.duplicate_blocks += run[:duplicates]
        sequence.committed_blocks = full

    def free(self, sequence: ScheduledSequence) -> None:
        """Free the blocks of `sequence`. Committed ones stay in the tree."""
        self._put_free(sequence.duplicate_blocks)
        self._put_free(sequence.blocks[sequence.committed_blocks :])
        for pool, held in zip(self.further_pools, sequence.further_held, strict=True):
            pool.release(held.blocks)
        if sequence.prefix_lock is not None:
            reused = sequence.cached_tokens // self.block_size
            self.tree.release(sequence.prefix_lock, reused if self.states is not None else 0)

    def _make_free(self, count: int) -> None:
        """Evict until `count` blocks are free, or none is left."""
        if (missing := count - len(self._free)) > 0:
            self._put_free(self.tree.evict(missing))

    def _put_free(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block is freed once"

    def reusable_key(self, sequence: ScheduledSequence) -> bytes:
        """Return the whole blocks of its key that may be reused. At least one token is left to compute."""
        # Prompt log-probabilities need the whole prompt computed. They arrive with the first new token.
        request = sequence.request
        if not self.caching or "prefix" in request.without or (request.logprobs.prompt and not sequence.generated):
            return b""
        bytes_of_all_but_one = (sequence.length - 1) * TOKEN_BYTES
        size = bytes_of_all_but_one - bytes_of_all_but_one % self._block_bytes
        if len(sequence.reusable_key) != size:  # kept, as several replicas are asked
            key = sequence.prompt_key if size <= len(sequence.prompt_key) else sequence.key
            sequence.reusable_key = key[:size]
        return sequence.reusable_key

    def no_allocations(self) -> list[Allocations]:
        """Return an empty list for each group."""
        return [[] for _ in range(1 + len(self.further_pools))]

    def check_room(self, sequence: ScheduledSequence) -> None:
        """Note `sequence` for more blocks if it is near the end of its block table."""
        room = sequence.capacity - sequence.length
        if room < self.low_room and sequence.capacity < sequence.max_length:
            self._growing[sequence.id] = sequence
            self.urgent = self.urgent or room < self.urgent_room

    def stop_growth(self, sequence: ScheduledSequence) -> None:
        self._growing.pop(sequence.id, None)

    def grow(self, growth_tokens: int, spare: int) -> tuple[list[Allocations], list[ScheduledSequence]]:
        """If it is urgent, allocate blocks to all sequences with little room, oldest first.

        Return the allocations of each group, and the stalled sequences: those without room that got no block.
        """
        allocations = self.no_allocations()
        stalled: list[ScheduledSequence] = []
        if not self.urgent:
            return allocations, stalled
        size, pools = self.block_size, self.pools
        growth_tokens += self.draft_room
        further = allocations[1:]
        growing = sorted(self._growing.values(), key=attrgetter("arrival"))
        ends = [-(-min(each.length + growth_tokens, each.max_length) // size) for each in growing]
        # Usually there is far more than all may want.
        is_scarce = self.is_scarce(spare + len(growing) * (growth_tokens // size + 3))
        if not is_scarce:  # evict once for all
            self._make_free(sum([max(0, end - len(each.blocks)) for each, end in zip(growing, ends, strict=True)]))
        for sequence, end in zip(growing, ends, strict=True):
            if is_scarce:
                end = self._affordable(sequence, end, spare)
            if end * size > sequence.capacity:
                if (count := end - len(sequence.blocks)) > 0:
                    allocations[0].append((sequence.slot, tuple(self.allocate(sequence, count))))
                if pools:
                    position = sequence.num_kv_tokens
                    for pool, held, allocated in zip(pools, sequence.further, further, strict=False):
                        if position >= held.needed_until:
                            pool.give_back(held, position)
                        if end > held.end:
                            allocated.append((sequence.slot, pool.extend(held, end)))
                sequence.capacity = end * size
                del self._growing[sequence.id]
            elif sequence.length > sequence.capacity:
                stalled.append(sequence)
        self.urgent = any(each.capacity - each.length < self.urgent_room for each in self._growing.values())
        return allocations, stalled

    def _affordable(self, sequence: ScheduledSequence, end: int, spare: int) -> int:
        """Return the block up to which `sequence` may grow while blocks are scarce.

        That is `end` while `spare` more are left; else the next one, or 0 if there is none.
        """
        self.give_back(sequence)
        if not self._has_blocks(sequence, end, spare):
            end = min(end, sequence.capacity // self.block_size + 1)
        return end if self._has_blocks(sequence, end, 0) else 0
