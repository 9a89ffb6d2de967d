"""Run: one session on the engine, shared by the gateway's calls.

    waiting ──a slot is free──► seated ──finished, failed, dropped──► slot free again

An output that leaves before its end gives its slot back once a report shows that the release was applied: what still comes
for it until then is nobody's. At most one set of orders is under way: whatever changes meanwhile goes with the next, so that
two hundred calls that come at once take two boundaries and not two hundred. With nobody left the session waits for the next
call, and ends if somebody else wants the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import grpc
import structlog

from text_generation_shard.engine import Admission, FailureCode, Orders, StepResult, TopTokens
from text_generation_shard.gateway.errors import CallFailed
from text_generation_shard.gateway.output import Output
from text_generation_shard.session import Report, Session

log = structlog.get_logger()

_CODES = {
    FailureCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FailureCode.NUMERICS: grpc.StatusCode.INTERNAL,
    FailureCode.STEP: grpc.StatusCode.INTERNAL,
}


class Run:
    """Lives on the event loop. `begin`, then `add` and `drop`; `tell` takes what the session has to say."""

    def __init__(self, max_slots: int, why_over: Callable[[], CallFailed]) -> None:
        """`why_over` says what to tell the calls of a session that ends while they run."""
        self.over = False
        """Whether the session has ended, or was told to."""
        self._why_over = why_over
        self._session: Session | None = None
        self._waiting: deque[Output] = deque()
        self._seated: dict[int, Output] = {}
        """By slot; each has to go on."""
        self._free = list(reversed(range(max_slots)))
        self._to_release: set[int] = set()
        """Slots whose output has left, which the engine does not know yet."""
        self._releasing: set[int] = set()
        """Slots that the orders under way release."""
        self._ordered = 0
        self._applied = 0

    def begin(self, session: Session) -> None:
        """Orders go to `session` from now on."""
        self._session = session

    def add(self, outputs: Iterable[Output]) -> None:
        """Have them computed, in this order, as slots come free."""
        self._waiting += outputs
        self._order()

    def drop(self, outputs: Iterable[Output]) -> None:
        """Nobody waits for these any more. Those that have ended are gone already."""
        if self.over:
            return
        for output in outputs:
            if output in self._waiting:
                self._waiting.remove(output)
            else:
                self._leave(output)
        self._order()

    def yield_engine(self) -> None:
        """Somebody else wants the engine: end the session, unless somebody is in it."""
        if not self.over and not self._waiting and not self._seated:
            self._close()

    def tell(self, report: Report | None) -> None:
        """What the session reports; None: it is over."""
        if self.over:
            return
        if report is None:
            self._end(self._why_over())
            return
        try:
            self._take(report.result)
            if report.orders_applied > self._applied:
                self._applied = report.orders_applied
                self._free += self._releasing
                self._releasing.clear()
            self._order()
        except Exception:  # whatever is wrong here, nobody may wait for ever
            log.exception("bug")
            self._close()
            self._end(CallFailed(grpc.StatusCode.INTERNAL, "the shard failed"))

    def _close(self) -> None:
        """End the session, which drops what the engine holds."""
        self.over = True
        if self._session is not None:
            self._session.end()

    def _end(self, why: CallFailed) -> None:
        """The session is over for whoever is still here."""
        self.over = True
        for output in (*self._waiting, *self._seated.values()):
            output.fail(why)
        self._waiting.clear()
        self._seated.clear()

    def _order(self) -> None:
        """Send what is to change, unless orders are under way."""
        if self._session is None or self.over or self._ordered > self._applied:
            return
        admit: list[Admission] = []
        while self._waiting and self._free:
            output = self._waiting.popleft()
            output.admission = replace(output.admission, slot=self._free.pop())
            self._seated[output.admission.slot] = output
            admit.append(output.admission)
        if admit or self._to_release:
            self._ordered += 1
            self._releasing, self._to_release = self._to_release, set()
            self._session.order(Orders(self._ordered, release=tuple(self._releasing), admit=tuple(admit)))

    def _take(self, result: StepResult) -> None:
        finished = dict(result.finished)
        for slot, token_ids, logprobs, tops in _columns(result):
            if (output := self._seated.get(slot)) is not None:
                output.take(token_ids, logprobs, tops, finished.get(slot))
                if output.is_over and slot not in finished:
                    self._leave(output)  # a stop string
        for scores in result.prompt_logprobs:
            if (output := self._seated.get(scores.slot)) is not None:
                output.score_prompt(scores)
        for failure in result.failed:
            if (output := self._seated.get(failure.slot)) is not None:
                output.fail(CallFailed(_CODES[failure.code], failure.message))
        for slot in (*finished, *(failure.slot for failure in result.failed)):
            if (output := self._seated.get(slot)) is not None:
                # A sequence finishes with a token, of which it was told above.
                output.fail(CallFailed(grpc.StatusCode.INTERNAL, "the engine ended the sequence without a token"))
            self._free_now(slot)

    def _leave(self, output: Output) -> None:
        slot = output.admission.slot
        if self._seated.get(slot) is output:
            del self._seated[slot]
            self._to_release.add(slot)

    def _free_now(self, slot: int) -> None:
        """The engine itself has dropped what was in `slot`."""
        if slot in self._seated or slot in self._to_release or slot in self._releasing:
            self._seated.pop(slot, None)
            self._to_release.discard(slot)
            self._releasing.discard(slot)
            self._free.append(slot)


def _columns(result: StepResult) -> Iterator[tuple[int, Sequence[int], Sequence[float], Sequence[TopTokens]]]:
    """A step's tokens by slot: (slot, token ids, logprobs, most probable ones)."""
    tops: dict[int, list[TopTokens]] = {}
    for top in result.top_tokens:
        tops.setdefault(top.slot, []).append(top)
    at = 0
    for slot, count in zip(result.slots, result.token_counts or [1] * len(result.slots), strict=True):
        yield slot, result.token_ids[at : at + count], result.logprobs[at : at + count], tops.get(slot, ())
        at += count
