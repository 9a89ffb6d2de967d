"""Generation: turns the token ids of one request into text, finds stop strings, and feeds a sink.

Cluster ── on_token(id, logprob) ──► Generation ── on_output(text …) ──► Sink (an SSE stream, or a collector)
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from text_generation_proto.values import FinishReason
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.errors import ServingError
from text_generation_router.request import LogprobJson, Request, TokenId, TopToken
from text_generation_router.text.stop import StopMatcher
from text_generation_router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of a request that ended normally."""

    reason: FinishReason
    text: str
    """All new text, without special tokens."""
    generated_tokens: int
    stop: str | None = None
    """The stop sequence that ended it, if one did."""
    deltas: Sequence[str] = ()
    """The text by token."""


class TokenOutput(NamedTuple):
    """A new token and its text. The joined deltas are the text of the ending."""

    number: int
    """From 1: of the generation's new tokens, those without text included."""
    token_id: TokenId
    text: str
    """The token's own text, as TGI shows it: that of a special token too. Empty while a character is incomplete; the
    completing token carries it whole."""
    delta: str
    """The addition to the generated text."""
    logprob: LogprobJson
    special: bool
    top: Sequence[TopToken]
    ending: GenerationResult | None
    """Set for the last token."""


class Sink(Protocol):
    """The consumer of one request's tokens. Called on the event loop; must neither block nor raise.

    An output with an ending, or a failure, is the last call.
    """

    __slots__ = ()

    def on_text(self, number: int, token_id: TokenId, text: str, logprob: LogprobJson) -> None:
        """Take an output of the usual kind: not special, without alternatives, not the last. `text` is its delta, too."""
        self.on_output(TokenOutput(number, token_id, text, text, logprob, special=False, top=(), ending=None))

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        """Take the log-probabilities of the prompt, if the request asks for them."""
        raise AssertionError("not asked for")

    def on_output(self, output: TokenOutput) -> None: ...
    def on_failure(self, error: ServingError) -> None: ...


@dataclass(slots=True)
class GenerationTimes:
    """Times of a request in seconds of the monotonic clock, 0 if not reached, and counts of its tokens."""

    queued: float = 0.0
    scheduled: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens found in the KV cache when it first left the queue."""
    generated_tokens: int = 0
    """New tokens, known at its end."""
    predicted_tokens: int = 0
    """Tokens that were drafted from its prediction."""
    accepted_tokens: int = 0
    """Drafted tokens of its prediction that are part of the text."""
    first_token: float = 0.0
    ended: float = 0.0
    """Time of the last token, or of the failure."""
    placements: list[tuple[float, int]] = field(default_factory=list)
    """Times at which it left the queue, and its replica from then on."""
    losses: list[float] = field(default_factory=list)
    """Times at which it lost its replica."""
    on_first_token: Callable[[float], None] | None = None
    """Called with the time of the first token when it arrives."""


class Generation:
    """One running request: receives token ids, sends text to its sink."""

    __slots__ = (
        "_accepted_end",
        "_detokenizer",
        "_sink",
        "_special",
        "_stop_wins",
        "_stops",
        "_texts",
        "_visible",
        "times",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer, sink: Sink) -> None:
        self._detokenizer = tokenizer.detokenizer(request.prompt)
        self._special = tokenizer.special_texts
        self._visible = request.visible_special
        stops = request.stop_sequences
        self._stops = StopMatcher(stops, keep=request.keep_stop_text) if stops else None
        self._stop_wins = not request.keep_stop_text
        self._sink = sink
        self._texts: list[str] = []
        """The delta of each token."""
        self._accepted_end = 0
        """Number of the last accepted token of its prediction."""
        self.times = GenerationTimes(queued=time.monotonic())

    @property
    def count(self) -> int:
        return len(self._texts)

    def on_scheduled(self, cached_tokens: int, replica: int) -> None:
        times, now = self.times, time.monotonic()
        times.placements.append((now, replica))
        if not times.scheduled:  # a preempted or moved request is scheduled again, and hits its own tokens
            times.scheduled = now
            times.cached_tokens = cached_tokens

    def on_lost(self) -> None:
        self.times.losses.append(time.monotonic())

    def on_cached_tokens(self, cached_tokens: int) -> None:
        self.times.cached_tokens = cached_tokens

    def on_predicted(self, drafted: int, accepted: int) -> None:
        self.times.predicted_tokens += drafted
        self.times.accepted_tokens += accepted
        self._accepted_end = self.count + accepted

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        self._sink.on_prompt_logprobs(logprobs, tops)

    def on_failure(self, error: ServingError) -> None:
        self.times.ended = time.monotonic()
        self._sink.on_failure(error)

    def on_token(
        self, token_id: TokenId, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        # The memory of a stream is not in the processor's cache when its next token comes: objects that need not be
        # touched are not.
        special = self._special.get(token_id)
        if special is None:
            text = self._detokenizer.step(token_id)
        elif token_id in self._visible:
            text, special = special, None
        else:
            text = ""
        if reason is not None:
            text += self._detokenizer.flush()
        delta, stop = text, None
        if self._stops is not None:
            delta = self._stops.feed(text) if text else ""
            stop = self._stops.matched
            if stop is not None:
                # In TGI a token that is both the last allowed one and the end of a stop string ends by length. If the
                # stop string is cut from the text (OpenAI), the reason is the stop string.
                if reason is None or self._stop_wins:
                    reason = FinishReason.STOP_SEQUENCE
            elif reason is not None:
                delta += self._stops.flush()
        texts = self._texts
        texts.append(delta)
        if (number := len(texts)) == 1:
            self.times.first_token = now = time.monotonic()
            if self.times.on_first_token is not None:
                self.times.on_first_token(now)
        if reason is None and special is None and not top:
            self._sink.on_text(number, token_id, delta, logprob)
            return True
        ending = None
        if reason is not None:
            self.times.ended = time.monotonic()
            # A stop string may end the text before the tokens of its last step.
            self.times.accepted_tokens -= max(0, self._accepted_end - number)
            ending = GenerationResult(reason, "".join(texts), number, stop, texts)
        text = delta if special is None else special
        self._sink.on_output(TokenOutput(number, token_id, text, delta, logprob, special is not None, top, ending))
        return ending is None


@contextmanager
def run_generation(
    cluster: ClusterInterface, request: Request, tokenizer: Tokenizer, sink: Sink
) -> Iterator[GenerationTimes]:
    """Queue `request` and send its output to `sink`. Leaving the block cancels it. Raises ServingError if it is refused."""
    generation = Generation(request, tokenizer, sink)
    cluster.submit(request, generation)
    try:
        yield generation.times
    finally:
        generation.times.generated_tokens = generation.count
        cluster.cancel(request.id)
