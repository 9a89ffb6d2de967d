"""The thread and the stream of the device on which images are encoded beside the steps."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from text_generation_common.one_line import typed_line
from text_generation_shard.engines.torch.engine.prompt_images import (
    EncodedRows,
    ImageEncoder,
    ImageError,
    Inputs,
    NotEncoded,
)


class EncoderThread:
    """Encodes images in the order in which they are decoded; those that wait, together.

    The operations of one image of 1,000 × 1,000 pixels took 27 ms to launch and 18 to compute with Qwen3-VL-8B on one H200.
    """

    def __init__(self, encoder: ImageEncoder, device: torch.device, budget: int) -> None:
        self._encoder = encoder
        self._device = device
        self._thread = ThreadPoolExecutor(1, "image encoder")
        self._waiting = deque[ref[EncodedRows]]()
        """The images that wait. Only the thread takes some away."""
        self._most_tokens = budget
        """Tokens of images that are encoded together: steps may wait for all of them."""
        self._most_values = 0
        """Values of the pixels of images that are encoded together: those of the image whose memory was measured."""
        if device.type == "cuda":
            self._stream, self._steps_stream = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]

    def encode(self, image: EncodedRows) -> None:
        """Set the rows of an image once it is decoded, if it is still referred to."""
        image.inputs.add_done_callback(partial(self._queue, ref(image)))

    def encode_largest(self) -> tuple[Tensor, int]:
        """Return the rows of a large image, and the bytes of the device that its encoding took."""
        temporary = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        inputs = self._encoder.largest()
        (rows,) = self._thread.submit(self._on_own_stream, lambda: self._encoder.encode([inputs], 0)).result()
        if self._device.type == "cuda":
            temporary = torch.cuda.max_memory_allocated(self._device) - before
        self._most_values = inputs["pixel_values"].numel()
        return rows, temporary

    def close(self) -> None:
        """Encode no more images."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _queue(self, image: "ref[EncodedRows]", _: Future[Inputs]) -> None:
        self._waiting.append(image)
        with suppress(RuntimeError):  # the engine is closed
            self._thread.submit(self._encode_next)

    def _encode_next(self) -> None:
        """Encode the image that waits for longest, if there is one, and those behind it that can be encoded with it.

        The tokens alone do not limit the memory: LLaVA-NeXT drops rows of thin images.
        """
        images: list[EncodedRows] = []
        tokens = values = 0
        while self._waiting:
            image = self._waiting[0]()  # None if the sequences that needed it were dropped
            if image is not None and (error := image.inputs.exception()) is not None:
                image.set_exception(error)
            elif image is not None:
                inputs = image.inputs.result()
                tokens += image.tokens
                values += inputs["pixel_values"].numel()
                is_too_much = tokens > self._most_tokens or values > self._most_values
                if images and (is_too_much or _form(inputs) != _form(images[0].inputs.result())):
                    break
                images.append(image)
            self._waiting.popleft()
        if images:
            self._encode(images)

    def _encode(self, images: Sequence[EncodedRows]) -> None:
        """Encode images together; one by one after an error, which one of them may have caused."""
        try:
            found = self._on_own_stream(lambda: self._rows(images))
        except Exception as error:  # noqa: BLE001 – the library raises errors of many kinds
            if len(images) == 1:
                is_own = isinstance(error, ImageError)
                failure = error if is_own else NotEncoded(f"an image is not encoded: {typed_line(error)}")
                images[0].set_exception(failure.with_traceback(None))
                return
        else:
            for image, rows in zip(images, found, strict=True):
                image.set_result(rows)
            return
        # Behind the handler: while the error exists, its frames keep the memory that the images took together.
        for image in images:
            self._encode([image])

    def _rows(self, images: Sequence[EncodedRows]) -> list[Tensor]:
        return self._encoder.encode([each.inputs.result() for each in images], sum(each.tokens for each in images))

    def _on_own_stream(self, encode: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the rows that `encode` computes on the stream of images, for the stream of the steps."""
        with torch.inference_mode():
            if self._device.type != "cuda":
                return encode()
            with torch.cuda.stream(self._stream):
                found = encode()
            self._stream.synchronize()
            for rows in found:
                rows.record_stream(self._steps_stream)
            return found


def _form(inputs: Inputs) -> dict[str, torch.Size]:
    """Return the sizes of inputs behind the first dimension. Those of images that are encoded together are equal."""
    return {name: each.shape[1:] for name, each in inputs.items()}
