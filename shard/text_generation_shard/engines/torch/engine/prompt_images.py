"""The images of a prompt: their places in it, their rows, and the encoder that computes these."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from text_generation_proto.values import FailureCode
from text_generation_shard.engine import NewSequence
from text_generation_shard.step.sequence import NO_LIMIT

Inputs = dict[str, Tensor]
"""The arguments of an encoder for an image, in host memory."""


class ImageError(Exception):
    """An image cannot be used; the message is one line for the client."""

    code = FailureCode.INVALID


class UnreadableImage(ImageError):
    """The file of an image cannot be decoded."""

    code = FailureCode.IMAGE


class NotEncoded(ImageError):
    """The encoder failed."""

    code = FailureCode.STEP


@dataclass(slots=True)
class Picture:
    """An image of a prompt, as the encoder takes it."""

    digest: bytes
    places: NDArray[np.int64]
    """The positions in the prompt that its rows take."""
    start: int
    end: int
    """Its first position, and that after its last."""
    inputs: Callable[[], "Future[Inputs]"]
    """Returns the arguments of the encoder, which are computed beside the engine from the first call on."""


class EncodedRows(Future[Tensor]):
    """The rows of an image that is encoded beside the steps. Several sequences may wait for it, so that none can cancel it."""

    def __init__(self, tokens: int, inputs: Future[Inputs]) -> None:
        super().__init__()
        self.tokens = tokens
        self.inputs = inputs
        self.set_running_or_notify_cancel()

    @property
    def is_queued(self) -> bool:
        """True from the end of decoding to the end of encoding."""
        return self.inputs.done() and not self.done()


@dataclass(slots=True)
class PromptImages:
    """The images of a prompt while it is computed."""

    pictures: list[Picture]
    positions: NDArray[np.int64] | None
    """[3, prompt]: the rotary positions; None if they are those of a text."""
    shift: int = 0
    """Difference between rotary position and position, after the prompt."""
    encoded: dict[int, Tensor] = field(default_factory=dict)
    """The rows of pictures by their number, until the chunk with the last of them is launched."""
    encodings: dict[int, EncodedRows] = field(default_factory=dict)
    """The rows of pictures by their number, from the start of their encoding until they are taken for a chunk."""
    following: int = 0
    """Number of the first picture whose rows are not taken yet."""

    def skip(self, computed: int) -> None:
        """Go on with the first picture that is not computed."""
        while self.following < len(self.pictures) and self.pictures[self.following].end <= computed:
            self.following += 1

    @property
    def limit(self) -> int:
        """The first position whose picture is not encoded."""
        return self.pictures[self.following].start if self.following < len(self.pictures) else NO_LIMIT

    def rows(self, start: int, end: int) -> list[tuple[NDArray[np.int64], Tensor]]:
        """Return (positions, rows) of each picture in [start, end), and forget those that end there."""
        found = []
        for number, rows in list(self.encoded.items()):
            places = self.pictures[number].places
            first, last = np.searchsorted(places, (start, end)).tolist()
            if first < last:
                found.append((places[first:last], rows[:, first:last]))
            if last == len(places):
                del self.encoded[number]
        return found


class ImageEncoder(Protocol):
    """The image part of a model."""

    rotates: bool
    """True if images have rotary positions in several axes."""
    cached: "RowCache"

    def decode(self, new: NewSequence) -> Future[PromptImages]:
        """Decode the images of a sequence beside the engine. Fails with ImageError. May be called from any thread."""

    def encode(self, images: Sequence[Inputs], tokens: int) -> list[Tensor]:
        """Return the rows [levels, tokens, hidden] of each image: in the place of embeddings, then what is added after each of the first layers.

        `tokens`: those of all, by the prompts, which may be wrong.
        """

    def largest(self) -> Inputs:
        """Return the arguments of `encode` for an image of the largest usual size."""

    def close(self) -> None:
        """Stop decoding."""


class RowCache:
    """The rows of images by digest. Those that were not used for longest are dropped. `in` may be asked from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._left = most_bytes
        self._rows: dict[bytes, Tensor] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def get(self, digest: bytes) -> Tensor | None:
        """Return the rows of an image, which count as used now; None if they are not here."""
        if (rows := self._rows.pop(digest, None)) is not None:
            self._rows[digest] = rows
        return rows

    def put(self, digest: bytes, rows: Tensor) -> None:
        """Keep the rows of an image that is not here."""
        self._rows[digest] = rows
        self._left -= rows.nbytes
        while self._left < 0:
            self._left += self._rows.pop(next(iter(self._rows))).nbytes
