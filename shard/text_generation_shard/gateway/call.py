"""Call: one Generate call while it is being answered."""

from __future__ import annotations

import asyncio

from text_generation_shard.engine import Admission
from text_generation_shard.gateway.ask import Ask
from text_generation_shard.gateway.errors import CallFailed
from text_generation_shard.gateway.output import Output
from text_generation_shard.gateway.stop_strings import StopWatch
from text_generation_shard.gateway.vocabulary import Vocabulary


class Call:
    """What was asked for, and its outputs. `news` is set whenever one of them has changed."""

    def __init__(self, ask: Ask, vocabulary: Vocabulary | None) -> None:
        """`vocabulary` is needed where there are stop strings."""
        self.ask = ask
        self.news = asyncio.Event()
        self.outputs = [
            Output(index, admission, self.news.set, watch=_watch(ask, admission, vocabulary), keep_stop=ask.keep_stop)
            for index, admission in enumerate(ask.admissions)
        ]

    @property
    def is_over(self) -> bool:
        """Whether every output has ended."""
        return all(output.is_over for output in self.outputs)

    @property
    def failure(self) -> CallFailed | None:
        """The first error there is: it ends the call."""
        return next((output.failure for output in self.outputs if output.failure is not None), None)

    def cancel(self) -> None:
        """End what has not ended, with what there is."""
        for output in self.outputs:
            output.cancel()


def _watch(ask: Ask, admission: Admission, vocabulary: Vocabulary | None) -> StopWatch | None:
    if not ask.stops or vocabulary is None:
        return None
    spelling = vocabulary.text_after(admission.prompt)
    return StopWatch(ask.stops, spelling.step, keep=ask.keep_stop, min_tokens=admission.stopping.min_new_tokens)
