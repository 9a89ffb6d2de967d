"""Pictures are encoded beside the steps: ahead of the chunks that need them, once for all that wait, within a budget."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import Driver
from torch import Tensor
from vision_engines import limits, small_vision, vision_engine
from vision_models import Prompt, VisionModel, decoded, picture

from text_generation_proto.values import FailureCode
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.images import ImageSteps
from text_generation_shard.engines.torch.engine.prompt_images import EncodedRows, Picture, RowCache

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionModel, TorchEngine]:
    return small_vision(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def images(small: tuple[VisionModel, TorchEngine], monkeypatch: pytest.MonkeyPatch) -> ImageSteps:
    """The images of the engine, of which none is kept yet."""
    images = small[1]._images
    assert images is not None
    monkeypatch.setattr(images.encoder, "cached", RowCache(1 << 28))
    return images


class Gate:
    """Encoding waits until the gate is opened."""

    def __init__(self, encode: Callable[..., list[Tensor]]) -> None:
        self._encode = encode
        self.tokens: list[int] = []
        """Tokens of the pictures whose encoding has begun, of each call."""
        self.open = threading.Event()

    def __call__(self, images: Sequence[object], tokens: int) -> list[Tensor]:
        assert threading.current_thread() is not threading.main_thread()
        if tokens:  # else it is the warm-up
            self.tokens.append(tokens)
            assert self.open.wait(20)
        return self._encode(images, tokens)


@pytest.fixture
def gate(images: ImageSteps, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(images.encoder.encode)
    monkeypatch.setattr(images.encoder, "encode", gate)
    yield gate
    gate.open.set()


def test_chunks_wait_for_a_picture_and_add_up(small: tuple[VisionModel, TorchEngine]) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(replace(limits(), max_batch_prefill_tokens=16)))
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    admission = decoded(engine, prompt)
    later: object = admission["images"]
    pending = type(later)()
    stream = driver.admit(prompt.ids, NEW_TOKENS, chunk=4, **admission | {"images": pending})
    other = driver.admit((9, 8, 7), 20)
    for _ in range(8):
        driver.step()
    assert len(other.tokens) == 8
    assert not stream.tokens
    assert not stream.to_prefill
    pending.set_result(later.result())
    text = driver.admit(tuple(range(40)), 2, chunk=16)
    while (result := driver.step()) is not None:
        # The largest step of the warm-up: 16 prompt tokens of one sequence, and one token of each other.
        assert sum(tokens for _, tokens in result.prefilled) + bool(other.finish is None) <= 16 + 5
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
    assert text.tokens == vision.greedy(Prompt(text.prompt, ()), 2)


def test_a_picture_that_is_no_longer_kept_is_decoded_again_beside_the_steps(
    small: tuple[VisionModel, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    assert engine._images is not None
    encoder, may_decode = engine._images.encoder, threading.Event()
    inputs, driver = encoder._inputs, Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    driver.admit(prompt.ids, 1, **decoded(engine, prompt))
    driver.run()

    def decode(data: bytes, number: int) -> object:
        assert threading.current_thread() is not threading.main_thread()
        may_decode.wait(10)
        return inputs(data, number)

    monkeypatch.setattr(encoder, "_inputs", decode)
    admission = decoded(engine, prompt)  # its rows are kept
    monkeypatch.setattr(encoder, "cached", RowCache(0))
    stream, other = driver.admit(prompt.ids, NEW_TOKENS, **admission), driver.admit((9, 8, 7), 5)
    while not other.is_over:
        driver.step()
    assert driver.step() is not None  # it goes on, although there is nothing to compute
    assert not stream.tokens
    may_decode.set()
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_steps_go_on_beside_a_picture_larger_than_the_budget(
    small: tuple[VisionModel, TorchEngine], images: ImageSteps, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(50, 60)])
    monkeypatch.setattr(images, "budget", prompt.media[0].tokens - 1)
    stream, other = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)), driver.admit((9, 8, 7), 8)
    while not other.is_over:
        result = driver.step()
        assert result is not None
        # The few tokens before the picture wait for it.
        assert stream.slot not in dict(result.prefilled)
    assert driver.step() is not None  # it goes on, although there is nothing to compute
    gate.open.set()
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
    assert other.tokens == vision.greedy(Prompt(other.prompt, ()), 8)


def test_steps_go_on_beside_a_picture_behind_one_larger_than_the_budget(
    small: tuple[VisionModel, TorchEngine], images: ImageSteps, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    large, tiny = vision.prompt([picture(70, 70, 7)]), vision.prompt([picture(20, 20, 8)])
    monkeypatch.setattr(images, "budget", tiny.media[0].tokens)
    streams = []
    for prompt in (large, tiny):
        streams.append(driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)))
        driver.step()
    other = driver.admit((9, 8, 7), 8)
    for _ in range(9):
        driver.step()
    assert len(other.tokens) == 8
    gate.open.set()
    driver.run()
    assert [each.tokens for each in streams] == [vision.greedy(each, NEW_TOKENS) for each in (large, tiny)]


def test_a_chunk_that_ends_inside_a_picture_does_not_wait_for_the_next_one(tmp_path: Path) -> None:
    """It waits for orders, which come if steps go on."""
    vision = VisionModel("gemma3", tmp_path)  # one chunk must have all tokens of a picture
    engine = vision_engine(vision)
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    stream = driver.admit(prompt.ids, NEW_TOKENS, chunk=prompt.media[0].offset + 3, **decoded(engine, prompt))
    driver.step()
    left, stream.to_prefill = stream.to_prefill, 0
    wait(engine._table.sequences[stream.slot].images.encodings.values(), 20)
    other = driver.admit((9, 8, 7), 8)
    driver.run()  # ends: no step waits beside an image that is encoded
    assert len(other.tokens) == 8
    stream.to_prefill = left
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_sequences_that_decode_wait_for_a_picture_but_not_prompts(
    small: tuple[VisionModel, TorchEngine], gate: Gate
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt, text = vision.prompt([picture(60, 50)]), tuple(range(7, 27))
    other = driver.admit((9, 8, 7), 20)
    driver.step()
    stream, long = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)), driver.admit(text, 2, chunk=7)
    while not long.tokens:
        driver.step()
    tokens = len(other.tokens)
    assert tokens > 2  # one with each chunk
    for _ in range(5):
        assert driver.step() is not None
    assert len(other.tokens) == tokens
    gate.open.set()
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
    assert other.tokens == vision.greedy(Prompt(other.prompt, ()), 20)
    assert long.tokens == vision.greedy(Prompt(text, ()), 2)


def test_pictures_are_encoded_ahead_within_the_budget(
    small: tuple[VisionModel, TorchEngine], images: ImageSteps, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(64, 64, seed) for seed in range(4)])
    tokens = prompt.media[0].tokens
    monkeypatch.setattr(images, "budget", 2 * tokens)
    gate.open.set()
    stream = driver.admit(prompt.ids, NEW_TOKENS, chunk=1, **decoded(engine, prompt))
    assert prompt.media[0].offset > 2
    driver.step()  # computes a token before the first picture
    wait(engine._table.sequences[stream.slot].images.encodings.values(), 20)
    driver.step()
    assert sum(gate.tokens) == 2 * tokens
    driver.run()
    assert sum(gate.tokens) == 4 * tokens
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_a_picture_is_encoded_once_for_all_that_wait(small: tuple[VisionModel, TorchEngine], gate: Gate) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(45, 31)])
    streams = [driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)) for _ in range(3)]
    driver.step()
    driver.release(streams[0])
    driver.step()
    gate.open.set()
    driver.run()
    assert len(gate.tokens) == 1
    assert [stream.tokens for stream in streams[1:]] == [vision.greedy(prompt, NEW_TOKENS)] * 2


@pytest.mark.parametrize("failing", [None, 2])
def test_pictures_that_wait_are_encoded_together(
    small: tuple[VisionModel, TorchEngine], images: ImageSteps, gate: Gate, failing: int | None
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompts = [vision.prompt([picture(40, 60, seed)]) for seed in range(6)]
    streams, pictures, encode = [], list[EncodedRows](), gate._encode
    for prompt in prompts:
        streams.append(driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)))
        driver.step()
        pictures += engine._table.sequences[streams[-1].slot].images.encodings.values()
    wait([each.inputs for each in pictures], 20)

    def encode_most(inputs: Sequence[object], tokens: int) -> list[Tensor]:
        if failing is not None and any(each is pictures[failing].inputs.result() for each in inputs):
            raise RuntimeError("no")
        return encode(inputs, tokens)

    gate._encode = encode_most
    gate.open.set()
    driver.run()
    tokens = prompts[0].media[0].tokens
    most = images._thread._most_values // pictures[0].inputs.result()["pixel_values"].numel()
    assert 1 < most < 5
    assert gate.tokens[:2] == [tokens, most * tokens]
    assert sum(gate.tokens) == (6 if failing is None else 6 + most) * tokens
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        if number == failing:
            assert stream.failure is not None
            assert (stream.failure.code, stream.tokens) == (FailureCode.STEP, [])
        else:
            assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_pictures_encoded_together_get_their_own_rows_whatever_the_prompts_have(tmp_path: Path) -> None:
    """One has a placeholder too many, and one too few: together they have as many as rows."""
    vision = VisionModel("mistral3", tmp_path)
    engine = vision_engine(vision)
    images = engine._images
    assert images is not None
    gate = images.encoder.encode = Gate(images.encoder.encode)
    driver = Driver(engine, engine.warm_up(limits()))
    prompts = [vision.prompt([picture(112, 56, seed)]) for seed in range(4)]
    for number, more in ((1, 1), (3, -1)):
        media, ids = prompts[number].media[0], list(prompts[number].ids)
        ids[media.offset : media.end] = [ids[media.offset]] * (media.tokens + more)
        prompts[number] = Prompt(tuple(ids), (replace(media, tokens=media.tokens + more),))
    images._thread._most_values *= 4
    streams = []
    for prompt in prompts:
        streams.append(driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)))
        driver.step()
    gate.open.set()
    driver.run()
    assert gate.tokens == [8, 24]
    for prompt, stream in zip(prompts[::2], streams[::2], strict=True):
        assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
    messages = [stream.failure and stream.failure.message for stream in streams[1::2]]
    assert messages == [f"an image has {number} placeholders for 8 rows" for number in (9, 7)]


def test_an_encoder_that_fails_costs_those_that_wait_for_it(
    small: tuple[VisionModel, TorchEngine], images: ImageSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(31, 90)])  # no other test's, whose rows may still be there

    def fail(images: Sequence[object], tokens: int) -> list[Tensor]:
        raise RuntimeError(f"no {tokens}\nrows of {len(images)}")

    gc.collect()
    gc.disable()  # what failed is freed at once
    try:
        with monkeypatch.context() as patch:
            patch.setattr(images.encoder, "encode", fail)
            failed = [driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)) for _ in range(2)]
            other = driver.admit((9, 8, 7), 8)
            driver.run()
        images._thread._thread.submit(int).result()  # the thread has left the pictures
        assert not any(isinstance(each, EncodedRows | Picture) for each in gc.get_objects())
    finally:
        gc.enable()
    for each in failed:
        assert each.failure is not None
        assert each.failure.code is FailureCode.STEP
        assert each.failure.message.startswith("an image is not encoded: ")
        assert "\n" not in each.failure.message
    assert other.tokens == vision.greedy(Prompt(other.prompt, ()), 8)
    stream = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt))
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_pictures_of_dropped_sequences_are_not_encoded(small: tuple[VisionModel, TorchEngine], gate: Gate) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    gc.collect()
    gc.disable()  # what a step needs no more is freed at once
    try:
        for seed in range(5):
            prompt = vision.prompt([picture(60, 50, seed)])
            stream = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt))
            driver.step()
            driver.release(stream)
            driver.step()
        assert len(gate.tokens) <= 1
        gate.open.set()
        prompt = vision.prompt([picture(60, 50, 5)])
        stream = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt))
        driver.run()
        assert len(gate.tokens) <= 2
        assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
        assert not any(isinstance(each, Picture) for each in gc.get_objects())
    finally:
        gc.enable()


def test_another_warm_up_measures_the_same_memory(small: tuple[VisionModel, TorchEngine], images: ImageSteps) -> None:
    _, engine = small
    engine.warm_up(limits())
    beside = images.reserved_bytes
    engine.warm_up(limits())
    assert images.reserved_bytes == beside


def test_an_engine_is_closed_while_a_picture_is_decoded_again(
    small: tuple[VisionModel, TorchEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vision, _ = small
    engine = vision_engine(vision)
    assert engine._images is not None
    encoder, may_decode = engine._images.encoder, threading.Event()
    inputs, driver = encoder._inputs, Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(70, 45)])
    driver.admit(prompt.ids, 1, **decoded(engine, prompt))
    driver.run()
    decoding = threading.Event()

    def decode(data: bytes, number: int) -> object:
        found = inputs(data, number)
        decoding.set()
        may_decode.wait(10)
        return found

    monkeypatch.setattr(encoder, "_inputs", decode)
    admission = decoded(engine, prompt)  # its rows are kept
    monkeypatch.setattr(encoder, "cached", RowCache(0))
    driver.admit(prompt.ids, 1, **admission)
    driver.step()
    assert decoding.wait(10)
    engine.close()
    may_decode.set()
    encoder._pool.shutdown()
    assert not caplog.records
