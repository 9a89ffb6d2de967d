"""Drives an engine like a router, with slots, blocks and prefill chunks, one step at a time, and collects the results."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FinishReason, Grammar, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders, PromptScores, StepResult, TopTokens

_LOGPROBS = {"top_n": "top_n", "prompt_logprobs": "prompt", "prompt_top_n": "prompt_top_n", "replayed": "generated"}
"""Arguments of `Driver.placements` → fields of LogprobOptions."""


@dataclass(eq=False)
class Stream:
    """A sequence and its results."""

    slot: int
    prompt: tuple[int, ...]
    stopping: Stopping
    sampling: Sampling
    blocks: list[int]
    to_prefill: int
    chunk: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    grammar: Grammar | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: Failure | None = None
    state: int = -1
    """The block of its state."""

    @property
    def prompt_logprobs(self) -> list[list[float]]:
        return [scores.logprobs for scores in self.prompt_scores]

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None


class Driver:
    """Holds the free slots and blocks of a warmed-up engine. KV blocks have the same number in all groups of its cache."""

    def __init__(self, engine: Engine, groups: Sequence[CacheGroup]) -> None:
        self.engine = engine
        self.streams: dict[int, Stream] = {}
        self._further = [group for group in groups[1:] if not group.is_state]
        self._free_blocks = list(range(min(group.num_blocks for group in groups if not group.is_state)))
        self.has_states = groups[-1].is_state
        self._free_states = list(range(groups[-1].num_blocks)) if self.has_states else []
        self._number = 0
        self._admit: list[NewSequence] = []
        self._grants: list[tuple[int, tuple[int, ...]]] = []
        self._states: list[tuple[int, tuple[int, ...]]] = []
        self._release: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.engine.info.block_size)

    def admit(
        self,
        prompt: Sequence[int],
        new: int = 8,
        *,
        chunk: int = 1 << 30,
        allocated: int | None = None,
        sampling: Sampling = Sampling(),
        shared: Sequence[int] = (),
        grammar: Grammar | None = None,
        checkpoint: int | None = None,
        **admission: object,
    ) -> Stream:
        """Admit a sequence with blocks for its longest output, or for `allocated` tokens; `shared` blocks come first.

        Waits for the matcher of a grammar. With `computed_tokens`, a model with states continues from the state in block `checkpoint`.
        """
        stopping = admission.pop("stopping", Stopping(max_new_tokens=new))
        assert isinstance(stopping, Stopping)
        count = self.blocks_for(len(prompt) + stopping.max_new_tokens if allocated is None else allocated) - len(shared)
        blocks = [*shared, *(self._free_blocks.pop() for _ in range(count))]
        slot = next(slot for slot in range(self.engine.info.max_slots) if slot not in self.streams)
        computed = admission.get("computed_tokens", 0)
        assert isinstance(computed, int)
        stream = Stream(slot, tuple(prompt), stopping, sampling, blocks, len(prompt) - computed, chunk, grammar=grammar)
        self.streams[slot] = stream
        if grammar is not None and self.engine.grammars is not None:
            generated = 0 if admission.get("replayed") else admission.get("generated_tokens", 0)
            assert isinstance(generated, int)
            matcher = self.engine.grammars.build(grammar, stream.prompt[len(prompt) - generated :])
            wait([matcher])
            admission["matcher"] = matcher
        options = {name: admission.pop(word) for word, name in _LOGPROBS.items() if word in admission}
        logprobs = LogprobOptions(tokens=True, **options)  # type: ignore[arg-type]
        further = ((0, tuple(blocks)),) * len(self._further)
        if self.has_states:
            stream.state = self._free_states.pop()
            further += ((0, (stream.state,) if checkpoint is None else (checkpoint, stream.state)),)
        self._admit.append(
            NewSequence(
                slot,
                stream.prompt,
                stopping,
                sampling,
                tuple(blocks),
                logprobs=logprobs,
                grammar=grammar,
                further_blocks=further,
                **admission,  # type: ignore[arg-type]
            )
        )
        return stream

    def alone(self, prompt: Sequence[int], new: int = 8, sampling: Sampling = Sampling()) -> list[int]:
        """Run one sequence to its end, by length, and return its tokens."""
        stream = self.admit(prompt, new, sampling=sampling)
        self.run()
        assert stream.finish is FinishReason.LENGTH
        assert len(stream.logprobs) == new
        assert all(-20 < logprob <= 0 for logprob in stream.logprobs)
        return stream.tokens

    def allocate(self, stream: Stream, tokens: int) -> None:
        """Allocate blocks for `tokens` more tokens."""
        blocks = [self._free_blocks.pop() for _ in range(self.blocks_for(tokens))]
        stream.blocks += blocks
        self._grants.append((stream.slot, tuple(blocks)))

    def keep_state(self, stream: Stream, position: int | None = None) -> int:
        """Let the tokens from `position` on write to another block; return the block that stays as a checkpoint.

        None: those after what is ordered.
        """
        kept, stream.state = stream.state, self._free_states.pop()
        if position is None:
            position = len(stream.prompt) - stream.to_prefill
        self._states.append((stream.slot, (position, stream.state)))
        return kept

    def release(self, stream: Stream) -> None:
        self._release.append(stream.slot)
        self._forget(stream)

    def preempt(self, stream: Stream, to: Driver | None = None, **admission: object) -> Stream:
        """Release the sequence and admit it again, or at another driver, with its generated tokens appended to the prompt."""
        self.release(stream)
        new, least, done = stream.stopping.max_new_tokens, stream.stopping.min_new_tokens, len(stream.tokens)
        left = replace(stream.stopping, max_new_tokens=new - done, min_new_tokens=max(0, least - done))
        return (to or self).admit(
            [*stream.prompt, *stream.tokens],
            sampling=stream.sampling,
            chunk=stream.chunk,
            stopping=left,
            generated_tokens=len(stream.tokens),
            grammar=stream.grammar,
            **admission,
        )

    def step(self) -> StepResult | None:
        """Send the pending orders and the next chunk of every prompt, and run one step."""
        prefill = []
        for stream in self.streams.values():
            if stream.to_prefill:
                prefill.append((stream.slot, min(stream.chunk, stream.to_prefill)))
                stream.to_prefill -= prefill[-1][1]
        self._number += 1
        grants = tuple(self._grants)
        further = (grants,) * len(self._further)
        if self.has_states:
            further += (tuple(self._states),)
        orders = Orders(self._number, tuple(self._release), tuple(self._admit), grants, tuple(prefill), further)
        self._release, self._admit, self._grants, self._states = [], [], [], []
        for failure in self.engine.apply(orders):
            self._fail(failure)
        result = self.engine.step()
        if result is not None:
            self._record(result)
        return result

    def run(self) -> None:
        """Step until nothing can advance."""
        while self.step() is not None or any(stream.to_prefill for stream in self.streams.values()):
            pass

    def _record(self, result: StepResult) -> None:
        for top in result.top_tokens:
            self.streams[top.slot].top_tokens.append(top)
        for scores in result.prompt_logprobs:
            self.streams[scores.slot].prompt_scores.append(scores)
        counts = result.token_counts or [1] * len(result.slots)
        slots = [slot for slot, count in zip(result.slots, counts, strict=True) for _ in range(count)]
        for slot, token, logprob in zip(slots, result.token_ids, result.logprobs, strict=True):
            self.streams[slot].tokens.append(token)
            self.streams[slot].logprobs.append(logprob)
        for slot, reason in result.finished:
            self.streams[slot].finish = reason
            self._forget(self.streams[slot])
        for failure in result.failed:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        if stream := self.streams.get(failure.slot):
            stream.failure = failure
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        del self.streams[stream.slot]
        self._free_blocks[:0] = stream.blocks
        if self.has_states:
            self._free_states[:0] = [stream.state]
