"""Chunked prefill: which prompts of a replica get how much of a step's token budget.

The budget of a step is `--max-batch-prefill-tokens`. Beside decoding sequences `ChunkSizer` lowers it: by a latency target
if there is one, else as the engine suggests.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from text_generation_router.request import RequestId
from text_generation_router.scheduling.keys import TOKEN_BYTES, common_bytes
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.sequence import ScheduledSequence, State

MIN_SHARED_TOKENS = 64
"""Shared prefix in tokens for which a sequence waits while it is computed for another one; shorter ones are recomputed."""
_PREFIX_BYTES = MIN_SHARED_TOKENS * TOKEN_BYTES

MIN_PREFILL_SHARE = 0.5
"""Prefill may lengthen a step by this share of its decode time even above the target: prompts always advance."""
MARGIN = 0.9
"""Share of the target that is aimed at: estimates follow a change one or two steps late."""
REPLAY_TOKENS = 512
"""Most tokens of a replay in one step: a request that comes meanwhile waits for the step."""
DECODE_STEPS = 8
"""Steps over which the decode time is averaged."""
MAX_RISE, DECAY = 2.0, 0.25
"""Limit of a rise of the estimated cost of a prompt token in one step; smoothing factor when it falls."""
MAX_GROWTH = 4
"""Limit of a budget relative to the largest chunk measured: few tokens do not show the cost of many."""


Reach = Callable[[ScheduledSequence], int]
"""Returns the prompt tokens of a sequence for which there are blocks."""


def share_budget(
    prompts: Sequence[ScheduledSequence], budget: int, reach: Reach | None = None
) -> Iterator[tuple[ScheduledSequence, int]]:
    """Yield (sequence, chunk) for `prompts`, given oldest first, until `budget` prompt tokens are spent.

    The shortest remainder goes first, so that a short prompt does not wait for a long one. Half of the budget is kept for
    the oldest prompt, so that a long one advances however many short ones arrive. It is yielded first, as it also takes its blocks
    first.
    """
    oldest, *others = prompts
    others.sort(key=attrgetter("unscheduled_tokens"))  # stable: ties by age
    shorter = sum(_most(each) for each in others if each.unscheduled_tokens < oldest.unscheduled_tokens)
    most = max(-(-budget // 2), budget - shorter)
    for sequence in (oldest, *others):
        chunk = min(_most(sequence), most)
        if reach is not None:
            chunk = min(chunk, reach(sequence))
        if chunk > 0:
            budget -= chunk
            yield sequence, chunk
        most = budget


def _most(sequence: ScheduledSequence) -> int:
    """Return the most prompt tokens of a sequence in one step."""
    return min(sequence.unscheduled_tokens, REPLAY_TOKENS) if sequence.request.replayed else sequence.unscheduled_tokens


def shared_tokens(key: bytes, other: bytes, block_size: int) -> int:
    """Return the leading tokens that two prompt keys have in common, in whole blocks."""
    return common_bytes(key, other, 0, block_size * TOKEN_BYTES) // TOKEN_BYTES


class ChunkSizer:
    """The token budget of a replica's next step, sized so that steps hold the latency target.

    Two terms: seconds = decode time + cost of a prompt token · prompt tokens. Steps without prompts give the decode time,
    the others the cost of a token. That cost grows along a prompt with the context that its tokens attend to, so it
    rises at once with a measurement and falls slowly.
    """

    def __init__(self, policy: Policy, block_size: int) -> None:
        self._max_tokens = policy.max_batch_prefill_tokens
        self._min_tokens = min(self._max_tokens, block_size)
        self._target_s = policy.target_itl_s
        self._chunk_tokens = min(self._max_tokens, policy.chunk_tokens or self._max_tokens)
        self._decode_s = 0.0
        self._token_s = 0.0
        self._largest_chunk = 0

    def update(self, prefill_tokens: int, decoding: int, seconds: float, steps: int = 1) -> None:
        """Record steps that took `seconds` each and computed `prefill_tokens` prompt tokens beside `decoding` sequences."""
        if not prefill_tokens:
            rate = min(1.0, steps / DECODE_STEPS) if self._decode_s else 1.0
            self._decode_s += rate * (seconds - self._decode_s)
            return
        self._largest_chunk = max(self._largest_chunk, prefill_tokens)
        expected_s = self._decode_s + self._token_s * prefill_tokens
        token_s = max(seconds - (self._decode_s if decoding else 0.0), 0.1 * seconds) / prefill_tokens
        if not self._token_s:
            self._token_s = token_s
        elif token_s > self._token_s:
            self._token_s = min(token_s, MAX_RISE * self._token_s)
        else:
            self._token_s += DECAY * (token_s - self._token_s)
        if decoding and self._decode_s:
            # Without steps that only decode, the decode time has to follow from those that do both.
            self._decode_s *= 1 + (min(max(seconds / expected_s, 0.5), 2.0) - 1) / (4 * DECODE_STEPS)

    def budget(self, decoding: int, prompts: int = 1) -> int:
        """Return the prompt tokens of `prompts` that the next step may compute beside `decoding` sequences."""
        if not decoding:
            return self._max_tokens
        if self._target_s is None:
            # A client that waits for its first token counts as much as one that waits for the next.
            return min(self._chunk_tokens * max(prompts, decoding) // decoding, self._max_tokens)
        if not self._token_s:
            return self._min_tokens
        room_s = max(MARGIN * self._target_s - self._decode_s, MIN_PREFILL_SHARE * self._decode_s)
        tokens = min(int(room_s / self._token_s), MAX_GROWTH * self._largest_chunk, self._max_tokens)
        return max(self._min_tokens, tokens)


class PendingPrompts:
    """The placed and running sequences of a replica whose prompt is not fully computed, oldest first."""

    def __init__(self, block_size: int, budget: int) -> None:
        self.blocks_kept = budget // 2 // block_size
        """Blocks of the part of a step's budget that is kept for the oldest."""
        self.unscheduled = 0
        """Prompt tokens not yet sent as chunks."""
        self.uncomputed = 0
        """Prompt tokens not yet reported as computed."""
        self._block_size = block_size
        self._sequences: dict[RequestId, ScheduledSequence] = {}
        self._by_prefix: dict[tuple[str, bytes], list[tuple[bytes, int, ScheduledSequence]]] = {}
        """Sequences by salt and their first MIN_SHARED_TOKENS tokens, sorted by prompt and arrival. Shorter prompts are left
        out."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._sequences.values())

    def __contains__(self, sequence: ScheduledSequence) -> bool:
        return sequence.id in self._sequences

    @property
    def running(self) -> int:
        """Number of sequences that run already."""
        return sum(1 for sequence in self._sequences.values() if sequence.state is State.RUNNING)

    @property
    def suspect(self) -> ScheduledSequence | None:
        """The sequence that may have been the cause of losses of replicas; None if there is none."""
        return next((each for each in self._sequences.values() if each.moves.is_suspect), None)

    def add(self, sequence: ScheduledSequence) -> None:
        self._sequences[sequence.id] = sequence
        if len(sequence.prompt_key) >= _PREFIX_BYTES:
            insort(self._by_prefix.setdefault(_prefix(sequence), []), (sequence.prompt_key, sequence.arrival, sequence))
        self.unscheduled += sequence.unscheduled_tokens
        self.uncomputed += sequence.prefill_length - sequence.num_computed_tokens

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove `sequence`; no-op if it is not here."""
        if self._sequences.pop(sequence.id, None) is None:
            return
        self.unscheduled -= sequence.unscheduled_tokens
        self.uncomputed -= sequence.prefill_length - sequence.num_computed_tokens
        prefix = _prefix(sequence)
        if (group := self._by_prefix.get(prefix)) is not None:
            del group[bisect_left(group, (sequence.prompt_key, sequence.arrival))]
            if not group:
                del self._by_prefix[prefix]

    def schedule(self, budget: int, reach: Reach | None = None) -> Iterator[tuple[ScheduledSequence, int]]:
        """Schedule chunks of `budget` tokens in all: yield (sequence, tokens)."""
        prompts = [each for each in self if each.unscheduled_tokens and (reach is None or reach(each) > 0)]
        if not prompts:
            return
        for sequence, chunk in share_budget(prompts, budget, reach):
            sequence.num_scheduled_tokens += chunk
            self.unscheduled -= chunk
            yield sequence, chunk

    def computed(self, sequence: ScheduledSequence, chunk: int) -> None:
        sequence.num_computed_tokens += chunk
        self.uncomputed -= chunk
        if sequence.num_computed_tokens == sequence.prefill_length:
            self.remove(sequence)

    def loaded(self, sequence: ScheduledSequence) -> None:
        """Let the prompt of a sequence go on after its cached tokens: they were loaded."""
        self.uncomputed -= sequence.cached_tokens - sequence.num_computed_tokens
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = sequence.cached_tokens
        self.unscheduled += sequence.unscheduled_tokens

    def longest_shared(self, sequence: ScheduledSequence) -> tuple[int, ScheduledSequence | None]:
        """Return the longest prefix in tokens that `sequence` shares with a pending prompt, and the owner of that prompt.

        Prefixes below MIN_SHARED_TOKENS count as none.
        """
        longest, owner = 0, None
        if self._sequences and (group := self._by_prefix.get(_prefix(sequence))):
            # In sorted order the longest prefix is shared with a neighbour.
            at = bisect_left(group, (sequence.prompt_key,))
            for key, _, other in group[max(0, at - 1) : at + 1]:
                shared = shared_tokens(sequence.prompt_key, key, self._block_size)
                if shared > longest:
                    longest, owner = shared, other
        most = (sequence.length - 1) // self._block_size * self._block_size
        return min(longest, most), owner


def _prefix(sequence: ScheduledSequence) -> tuple[str, bytes]:
    salt = f"{sequence.id}" if "prefix" in sequence.request.without else sequence.salt
    return salt, sequence.prompt_key[:_PREFIX_BYTES]
