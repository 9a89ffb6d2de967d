"""The images of prompts: decoded and encoded beside the step loop, and given to the steps that compute them.

A prompt has placeholder ids where its images are. `LibraryImages` of the models encodes an image to rows, which take the place of the
embeddings of these ids, beside the steps. A chunk waits until the images that it reaches are encoded; steps without prompts wait for
one image, and go on beside one of more tokens than the budget. Images of later chunks are encoded ahead, as many tokens of them as the
budget allows. Encoded images are kept by the digest of their files: the chunks of a prompt and the next turns of a chat share one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from text_generation_common.one_line import typed_line
from text_generation_proto.values import FailureCode
from text_generation_shard.engine import Failure
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.device.copies import upload
from text_generation_shard.engines.torch.engine.encoder_thread import EncoderThread
from text_generation_shard.engines.torch.engine.prompt_images import (
    EncodedRows,
    ImageEncoder,
    ImageError,
    Picture,
    PromptImages,
)
from text_generation_shard.step.sequence import NO_LIMIT, StepRow, StepRows
from text_generation_shard.step.sequence import Sequence as StepSequence
from text_generation_shard.step.table import SequenceTable


@dataclass(eq=False)
class ImageSteps:
    """Lets the images of the sequences of a table be encoded, at most about `budget` tokens of them before a chunk needs them."""

    encoder: ImageEncoder
    budget: int
    device: torch.device
    is_device_broken: Callable[[], bool]
    """Returns True if no step can be computed after an error. (Ranks still agree after one in an encoder, which rank 0 alone runs.)"""
    bidirectional: bool = False
    """A token of an image attends to later ones, so that one chunk has all tokens of an image that are not computed."""
    most_tokens: int = 0
    """Prompt tokens of the largest step, which the warm-up sets."""
    reserved_bytes: int = 0
    """Memory of the device for encoding beside the steps, and for the rows that are kept; measured by `place_largest`."""

    def __post_init__(self) -> None:
        self._thread = EncoderThread(self.encoder, self.device, self.budget)
        self._encodings = WeakValueDictionary[bytes, EncodedRows]()
        """By digest, those of which a sequence needs the rows."""

    def advance(self, table: SequenceTable) -> list[Failure]:
        """Take the images that are encoded, and start to encode others; return the sequences that were dropped."""
        failed: list[Failure] = []
        tokens = 0
        with_images_left = [
            each for each in table.sequences.values() if each.has_images and each.image_limit < NO_LIMIT
        ]
        for sequence in sorted(with_images_left, key=lambda each: not each.chunk):
            try:
                if (images := self._decoded(sequence)) is None:
                    continue
                needed = sequence.computed + sequence.chunk
                while images.limit < needed and (rows := self._rows(images)) is not None:
                    images.encoded[images.following] = rows
                    images.following += 1
                tokens = self._begin(images, needed, tokens)
                sequence.image_limit = images.limit
                is_needed = images.limit < needed
                sequence.pending_images = images.encodings.get(images.following) if is_needed else None
            except ImageError as error:
                if error.code is FailureCode.STEP and self.is_device_broken():
                    raise
                failed.append(table.drop(sequence, error.code, str(error)))
                # Its frames refer to the future that has it: memory that only a search for cycles would free.
                error.__traceback__ = None
        return failed

    def _begin(self, images: PromptImages, needed: int, tokens: int) -> int:
        """Start to encode the images of a prompt that begin before `needed`, and others within the budget.

        `tokens` of other prompts are being encoded, or were and are not taken yet; return their number with those of this one.
        """
        for number in range(images.following, len(images.pictures)):
            picture = images.pictures[number]
            if number not in images.encodings and picture.digest not in self.encoder.cached:
                if tokens and picture.start >= needed and tokens + len(picture.places) > self.budget:
                    break
                images.encodings[number] = self._encoding(picture)
            tokens += len(picture.places) * (number in images.encodings)
        return tokens

    def hold(self, table: SequenceTable) -> bool:
        """Return True if all chunks wait for images and one of them is being encoded, none of more than `budget` tokens before it.

        Sequences that decode wait for it too, as they do for the tokens of prompts: a step for few takes as long as one for all.
        """
        awaited: list[EncodedRows] = []
        for sequence in table.chunked():
            if not sequence.has_images or sequence.chunk_of_images(sequence.most_of_chunk) > 0:
                return False
            images: PromptImages | None = sequence.images
            if images is not None and sequence.pending_images is not None:
                awaited.append(images.encodings[images.following])
        if not any(each.inputs.done() for each in awaited):
            return False
        return all(each.tokens <= self.budget for each in self._encodings.values() if each.is_queued)

    def _rows(self, images: PromptImages) -> Tensor | None:
        """Return the rows of the next picture to take; None if it is not encoded. Raises ImageError."""
        picture, cached = images.pictures[images.following], self.encoder.cached
        if (encoding := images.encodings.get(images.following)) is None:
            rows = cached.get(picture.digest)
        elif encoding.done():
            del images.encodings[images.following]
            rows = encoding.result()
            if picture.digest not in cached:
                cached.put(picture.digest, rows)
        else:
            rows = None
        if rows is not None and rows.shape[1] != len(picture.places):
            raise ImageError(f"an image has {len(picture.places)} placeholders for {rows.shape[1]} rows")
        return rows

    def _encoding(self, picture: Picture) -> EncodedRows:
        """Return the rows of a picture, which are computed beside the steps."""
        rows = self._encodings.get(picture.digest)
        if rows is None or (rows.done() and rows.exception() is not None):
            rows = self._encodings[picture.digest] = EncodedRows(len(picture.places), picture.inputs())
            self._thread.encode(rows)
        return rows

    def of_step(
        self, rows: StepRows, prefills: Sequence[tuple[StepRow, int]], device: torch.device
    ) -> StepImages | None:
        """Return the images of a step; None if no chunk is of a prompt with images. `prefills` has chunks and their places."""
        with_images = [
            (row, offset, row.sequence.images) for row, offset in prefills if row.sequence.images is not None
        ]
        if not with_images:
            return None
        places: list[NDArray[np.int64]] = []
        parts: list[Tensor] = []
        ahead = np.zeros(rows.tokens, np.int64)
        for row, offset, images in with_images:
            for positions, part in images.rows(row.start, row.start + row.length):
                places.append(positions + (offset - row.start))
                ahead[places[-1]] = positions[-1] - positions
                parts.append(part)
        for row, _, images in with_images:
            if row.samples:
                row.sequence.images = PromptImages([], images.positions, images.shift)
        return StepImages(
            upload(np.concatenate(places), torch.int64, device) if places else None,
            torch.cat(parts, dim=1) if parts else None,
            self._positions(rows, device),
            upload(ahead, torch.int32, device) if self.bidirectional and places else None,
        )

    def of_prediction(self, rows: StepRows, device: torch.device) -> StepImages | None:
        """Return the rotary positions of a prediction; None if they are those of texts."""
        if not self.encoder.rotates or not any(row.prefills and row.sequence.images is not None for row in rows.others):
            return None
        return StepImages(None, None, self._positions(rows, device))

    def _positions(self, rows: StepRows, device: torch.device) -> Tensor | None:
        positions = _rotary_positions(rows) if self.encoder.rotates else None
        return None if positions is None else upload(positions.ravel(), torch.int64, device).view(3, -1)

    def place_largest(self, rows: StepRows) -> None:
        """Put a large image into the first prompt of a step, to measure its memory and to compile the kernels that it needs."""
        row = rows.others[0]
        encoded, temporary = self._thread.encode_largest()
        encoded = encoded[:, : row.length]
        self.reserved_bytes = temporary + self.encoder.cached.most_bytes
        places = np.arange(encoded.shape[1])
        picture = Picture(b"", places, 0, len(places), Future)
        positions = np.tile(np.arange(row.length), (3, 1)) if self.encoder.rotates else None
        row.sequence.images = PromptImages([picture], positions, encoded={0: encoded})

    def close(self) -> None:
        """Stop decoding and encoding."""
        self.encoder.close()
        self._thread.close()

    def _decoded(self, sequence: StepSequence) -> PromptImages | None:
        """Return the images of a sequence; None while they are decoded. Raises ImageError."""
        if sequence.images is None:
            pending = sequence.pending_images
            if pending is None or not pending.done():
                return None
            if (error := pending.exception()) is not None:
                raise (
                    error
                    if isinstance(error, ImageError)
                    else ImageError(f"an image cannot be used: {typed_line(error)}")
                )
            self._take(sequence, pending.result())
        found: PromptImages = sequence.images
        return found

    def _take(self, sequence: StepSequence, images: PromptImages) -> None:
        sequence.images = images
        if self.bidirectional:
            sequence.whole_images = [(each.start, each.end) for each in images.pictures]
            if (largest := max(end - first for first, end in sequence.whole_images)) > self.most_tokens:
                raise ImageError(
                    f"an image has {largest} tokens, and a step at most {self.most_tokens}: raise --max-batch-prefill-tokens"
                )
        images.skip(sequence.computed)


def shift_of(sequence: StepSequence) -> int:
    """Return the difference between rotary position and position of the tokens that a sequence generates."""
    return 0 if sequence.images is None else sequence.images.shift


def _rotary_positions(rows: StepRows) -> NDArray[np.int64]:
    """Return the rotary positions [3, tokens] of all tokens of a step."""
    parts: list[NDArray[np.int64]] = []
    if rows.persistent is not None:
        shifts = np.array([shift_of(sequence) for sequence in rows.persistent.sequences], dtype=np.int64)
        parts.append(np.broadcast_to(rows.persistent.starts + shifts, (3, len(shifts))))
    for row in rows.others:
        images, end = row.sequence.images, row.start + row.length
        if images is not None and row.prefills and images.positions is not None:
            parts.append(images.positions[:, row.start : end])
        else:
            shift = 0 if row.prefills else shift_of(row.sequence)
            parts.append(np.broadcast_to(np.arange(row.start + shift, end + shift), (3, row.length)))
    return np.concatenate(parts, axis=1)
