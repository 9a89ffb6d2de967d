"""The thread that encodes pictures: which of them together, and what it keeps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakSet

import torch
from torch import Tensor

from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.torch.engine.encoder_thread import EncoderThread
from text_generation_shard.engines.torch.engine.prompt_images import EncodedRows, Inputs, PromptImages, RowCache


class Encoder:
    """Encodes pictures to rows of zeros. More than `most` at once fail."""

    rotates = False
    cached = RowCache(0)

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.calls: list[int] = []
        """Pictures of each call."""
        self.kept: list[int] = []
        """The tensors of failed calls that exist, in each call."""
        self._activations = WeakSet[Tensor]()

    def encode(self, images: Sequence[Inputs], tokens: int) -> list[Tensor]:
        if not tokens:
            return [torch.zeros(1, 16, 4)]
        self.begun.set()
        assert self.may_end.wait(20)
        self.calls.append(len(images))
        self.kept.append(len(self._activations))
        activations = torch.zeros(9)
        if len(images) > self.most:
            self._activations.add(activations)
            raise torch.OutOfMemoryError("no memory")
        return [torch.zeros(1, tokens // len(images), 4) for _ in images]

    def largest(self) -> Inputs:
        return {"pixel_values": torch.zeros(32, 3)}

    def decode(self, new: NewSequence) -> Future[PromptImages]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def encoded(encoder: Encoder, budget: int, *, pixels: int = 4) -> list[int]:
    """Return the pictures of each call, for one picture of two tokens, and eight that wait meanwhile."""
    thread = EncoderThread(encoder, torch.device("cpu"), budget)
    thread.encode_largest()
    pictures = [EncodedRows(2, Future[Inputs]()) for _ in range(9)]
    for each in pictures:
        thread.encode(each)
        each.inputs.set_result({"pixel_values": torch.zeros(pixels, 3)})
        assert encoder.begun.wait(20)
    encoder.may_end.set()
    assert [each.result(20).shape for each in pictures] == [(1, 2, 4)] * 9
    thread.close()
    return encoder.calls


def test_pictures_are_encoded_together_up_to_the_largest_one_and_the_budget() -> None:
    assert encoded(Encoder(), 4096) == [1, 8]  # 16 tokens, and 32 pixels
    assert encoded(Encoder(), 7) == [1, 3, 3, 2]
    assert encoded(Encoder(), 1) == [1] * 9
    assert encoded(Encoder(), 4096, pixels=10) == [1, 3, 3, 2]  # of thin pictures the library drops rows


def test_the_memory_of_an_attempt_that_failed_is_free_for_the_next_one() -> None:
    encoder = Encoder(most=1)
    assert encoded(encoder, 4096) == [1, 8, *[1] * 8]
    assert encoder.kept == [0] * 10
