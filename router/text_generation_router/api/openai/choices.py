"""The stream of several choices, for completions and chats."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import orjson

from text_generation_router.api.http.dialects import DONE
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.openai.answers import Usage
from text_generation_router.api.openai.schemas import OpenAIBody, StreamOptions
from text_generation_router.errors import ServingError
from text_generation_router.generation import GenerationResult, Sink
from text_generation_router.web.sse import EventStream


class ChoicesStream(ABC):
    """The stream of one request. After every choice has ended follow the usage, if requested, and [DONE]."""

    def __init__(
        self, stream: EventStream, head: bytes, body: OpenAIBody, records: Sequence[GenerationRecord], field: bytes
    ) -> None:
        """`head`: the start of every chunk; `field`: the first field of a choice after its index."""
        options = body.stream_options or StreamOptions()
        self.stream = stream
        self.running_usage = bool(options.continuous_usage_stats)
        """The token counts so far are on every chunk."""
        self._shows_usage = bool(options.include_usage)
        self._head = head
        self._field = field
        self._records = records
        self._open = len(records)
        self._generated = self._reasoning = 0

    @abstractmethod
    def usage(self, generated: int, reasoning: int) -> Usage:
        """Return the token counts of all choices."""

    def head(self, index: int) -> bytes:
        """Return the start of a chunk, up to the value of the field."""
        return b'data: %b,"choices":[{"index":%d,"%b":' % (self._head, index, self._field)

    def ended(self, generated: int, reasoning: int) -> bytes:
        """Count the end of a choice; return the events that follow the last one."""
        self._open -= 1
        self._generated += generated
        self._reasoning += reasoning
        if self._open:
            return b""
        if not self._shows_usage:
            return DONE
        counts = orjson.dumps(self.usage(self._generated, self._reasoning))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._head, counts, DONE)

    def close(self) -> None:
        """Close the stream if every choice has ended."""
        if not self._open:
            self.stream.close()


class ChoiceSink(Sink):
    __slots__ = ("_choices", "_head", "_record", "_stream")

    def __init__(self, choices: ChoicesStream, index: int, record: GenerationRecord) -> None:
        self._choices = choices
        self._stream = choices.stream
        self._head = choices.head(index)
        """The start of a chunk."""
        self._record = record

    def on_failure(self, error: ServingError) -> None:
        self._record.failed(error)
        self._stream.fail(error)

    def _send_last(self, chunk: bytes, ending: GenerationResult, reasoning: int = 0, *, counts: bool = True) -> None:
        self._record.ending = ending
        self._stream.send(chunk + self._choices.ended(ending.generated_tokens, reasoning), counts=counts)
        self._choices.close()
