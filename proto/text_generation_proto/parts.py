"""Orders and reports of any size in messages of limited size: slices of the serialized whole.

Orders ──split──► part, part, …, last part ──Joiner──► Orders
"""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as GenericMessage

from text_generation_proto.v1 import shard_pb2 as pb

MAX_WHOLE_BYTES = 4 << 20
"""Orders and reports above this are sent in parts of this size."""
BYTES_PER_TOKEN = 14
"""Largest share of a prompt token in orders: its id of four bytes, one of a prediction, and one block at most."""
BYTES_PER_SEQUENCE = 2 << 20
"""Largest share of a sequence in orders apart from its tokens: its grammar, the bias of its logits, its stop tokens."""
BYTES_PER_LOGPROB = 16
"""Largest share of a log-probability and its token in reports."""

MAX_ORDERS_BYTES = 256 << 20
"""Bytes of the largest orders of any engine: 25 million prompt tokens in one step, or 1,000 of the longest grammars."""
MAX_IMAGE_ORDERS_BYTES = 3 << 29
"""The same for models that take images: more than a router holds of them."""

Message = TypeVar("Message", pb.Orders, pb.StepReport)


class BadParts(ValueError):
    """The parts of a message are too large together, or form none."""


def split(message: Message, files: Mapping[bytes, bytes] = {}) -> Iterator[Message]:
    """Yield the messages to send for `message`: itself unless it is too large.

    Orders may lack the data of images, which `files` has by digest. It is copied part by part.
    """
    if not files and message.ByteSize() <= MAX_WHOLE_BYTES:
        yield message
        return
    pieces = _pieces(message, files) if files and isinstance(message, pb.Orders) else [message.SerializeToString()]
    part = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), MAX_WHOLE_BYTES):
            part += memoryview(piece)[start : start + MAX_WHOLE_BYTES]
            if len(part) > MAX_WHOLE_BYTES:
                yield type(message)(part=bytes(part[:MAX_WHOLE_BYTES]), more=True)
                del part[:MAX_WHOLE_BYTES]
    yield type(message)(part=bytes(part))


def _pieces(orders: pb.Orders, files: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield serialized orders in pieces; each of `files` is one."""
    rest = pb.Orders()
    rest.CopyFrom(orders)
    rest.ClearField("placements")
    yield rest.SerializeToString()
    for placement in orders.placements:
        pieces: list[bytes] = []
        for media in placement.media:
            data = files[media.digest]
            head = media.SerializeToString() + field_head(pb.Media, "data", len(data))
            pieces += [field_head(pb.NewSequence, "media", len(head) + len(data)) + head, data]
        placement.ClearField("media")
        plain = placement.SerializeToString()
        yield field_head(pb.Orders, "placements", len(plain) + sum(map(len, pieces))) + plain
        yield from pieces


def field_head(kind: type[GenericMessage], field: str, size: int) -> bytes:
    """Return the bytes before a value of this many bytes in a serialized message: number and type of the field, and the size."""
    head = bytearray()
    for number in (kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2, size):
        while number > 0x7F:
            head.append(number & 0x7F | 0x80)
            number >>= 7
        head.append(number)
    return bytes(head)


class Joiner(Generic[Message]):
    """Joins the messages of one stream."""

    def __init__(self, most: int) -> None:
        """`most` is the number of bytes that a whole has at most."""
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0

    def join(self, message: Message) -> Message | None:
        """Return the whole that ends with `message`; None if more parts follow. Raises BadParts."""
        if not message.part:
            if self._parts or message.more:
                raise BadParts("a message came between the parts of another")
            return message
        self._parts.append(message.part)
        self._size += len(message.part)
        if self._size > self._most:
            raise BadParts(f"the parts of a message have more than {self._most} bytes")
        if message.more:
            return None
        parts, self._parts, self._size = self._parts, [], 0
        try:
            whole = type(message).FromString(b"".join(parts))
        except DecodeError as error:
            raise BadParts("the parts form no message") from error
        if whole.part:
            raise BadParts("a part has parts")
        return whole


def most_orders(info: pb.InfoResponse) -> int:
    """Return the bytes of the largest orders that a shard can apply."""
    if info.max_images:
        return MAX_IMAGE_ORDERS_BYTES
    by_engine = info.max_slots * (info.max_sequence_length * BYTES_PER_TOKEN + BYTES_PER_SEQUENCE)
    return min(by_engine, MAX_ORDERS_BYTES)


def most_report(info: pb.InfoResponse) -> int:
    """Return the bytes of the largest report that a shard can send."""
    logprobs = info.max_sequence_length * (1 + info.max_top_n_tokens)
    return info.max_slots * (logprobs * BYTES_PER_LOGPROB + BYTES_PER_SEQUENCE)
