"""Prompts with pictures in the torch engine: the logits of transformers, however the prompt is computed."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import cast

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from lora_folder import merged, random_adapter, untie, vocabulary_of
from PIL import Image, ImageOps
from reference_kernels import reference_engine
from tapes import Tapes
from torch import Tensor
from vision_engines import limits, small_vision, vision_engine
from vision_models import Prompt, VisionModel, decoded, picture, vision_configs

from text_generation_proto.values import FailureCode, Stopping
from text_generation_router.media.layouts import FAMILIES as LAYOUTS
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders, StepResult
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.attention.device_step import DeviceStep
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.models.huggingface.config import EMBEDS_IMAGES
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS
from text_generation_shard.engines.torch.runner.decode_graphs import GraphPool
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner
from text_generation_shard.engines.torch.runner.piecewise_graphs import PiecewiseGraphs
from text_generation_shard.progress import StepMonitor
from text_generation_shard.session import EngineSession

NEW_TOKENS = 4
SIZES = ((70, 45), (31, 90), (64, 64))
"""Odd, tall and square; in pixels."""
FAST = ("smolvlm", "qwen3_vl", "gemma3", "glm4v")
"""Tiles; several axes, and additions after layers; attention to later tokens of an image."""
NATIVE = [name for name in vision_configs() if name != "llama4"]
FEW = {"llava_onevision": 1}
"""Pictures of a prompt, where a family takes few."""


@pytest.fixture(scope="module", params=[name if name in FAST else full(name) for name in NATIVE])
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def prompts(vision: VisionModel) -> list[Prompt]:
    files = [picture(*size, seed) for seed, size in enumerate(SIZES)][: FEW.get(vision.model.config.model_type, 3)]
    return [vision.prompt(files), vision.prompt(files[:1]), Prompt((9, 8, 7, 6, 5, 4), ())]


@pytest.fixture(scope="module")
def engine(vision: VisionModel) -> TorchEngine:
    engine = vision_engine(vision)
    assert engine.info.max_images
    return engine


def check_all(engine: TorchEngine, vision: VisionModel, prompts: list[Prompt], chunk: int) -> None:
    """Compare prompts that are computed together, chunk by chunk, one of them preempted, with transformers."""
    driver = Driver(engine, engine.warm_up(limits()))
    streams = []
    for prompt in prompts:
        admission = decoded(engine, prompt) if prompt.media else {}
        streams.append(driver.admit(prompt.ids, NEW_TOKENS, chunk=chunk, prompt_logprobs=True, **admission))
        driver.step()
    while not streams[0].tokens:
        assert streams[0].failure is None
        driver.step()
    longer = Prompt((*prompts[0].ids, *streams[0].tokens), prompts[0].media)
    moved = driver.preempt(streams[0], **decoded(engine, longer))
    driver.run()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.failure is None
        expected, greedy = vision.reference(prompt, NEW_TOKENS)
        found = torch.tensor(stream.prompt_logprobs[0][1:])
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        tokens = stream.tokens + (moved.tokens if stream is streams[0] else [])
        assert tokens == greedy


def test_the_router_has_a_layout_for_each_model_that_takes_images() -> None:
    assert LAYOUTS.keys() == {name for name, each in WRAPPERS.items() if each.max_images}


@pytest.mark.parametrize("chunk", [5, full(1 << 20)])
def test_prompts_with_pictures(engine: TorchEngine, vision: VisionModel, prompts: list[Prompt], chunk: int) -> None:
    check_all(engine, vision, prompts, chunk)


def test_the_operations_of_a_gpu(vision: VisionModel, prompts: list[Prompt]) -> None:
    config = ShardConfig(model_path=vision.folder, device="cpu", max_batch_size=6)
    check_all(reference_engine(config), vision, prompts, 7)


def test_graphs_of_pieces(vision: VisionModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    if vision.model.config.model_type.endswith("_moe"):
        pytest.skip("on a CPU experts are computed in a loop over numbers on the host, which cannot be recorded")
    engine = reference_engine(ShardConfig(model_path=vision.folder, device="cpu", max_batch_size=6))
    runner, sizes = engine._executor._runner, list[int]()
    assert isinstance(runner, DeviceRunner)
    run = PiecewiseGraphs.run

    def counted(pieces: PiecewiseGraphs, step: DeviceStep) -> Tensor | None:
        found = run(pieces, step)
        sizes.append(step.num_tokens if found is not None and step.images is not None else 0)
        return found

    monkeypatch.setattr(PiecewiseGraphs, "run", counted)

    @torch.inference_mode()
    def capture(**_: object) -> int:
        return len(runner.capture_pieces(cast(GraphPool, Tapes()), (64, 16), lambda: None) or ())

    monkeypatch.setattr(runner, "capture", capture)
    check_all(engine, vision, prompts, 7)
    assert any(sizes)


@pytest.mark.parametrize("name", [name if name in (*FAST[:2], "llama4") else full(name) for name in vision_configs()])
def test_layers_that_transformers_runs(name: str, tmp_path: Path) -> None:
    """They take images that are embeddings and nothing more."""
    model = VisionModel(name, tmp_path)
    engine = build_engine(
        ShardConfig(model_path=model.folder, device="cpu", max_batch_size=6, model_impl="transformers")
    )
    assert isinstance(engine, TorchEngine)
    assert bool(engine.info.max_images) == (model.model.config.model_type in EMBEDS_IMAGES)
    if engine.info.max_images:
        files = [picture(*size) for size in SIZES][: engine.info.max_images]
        check_all(engine, model, [model.prompt(files), Prompt((9, 8, 7, 6, 5, 4), ())], 5)


def test_a_picture_of_one_token_and_an_adapter_of_the_embedding(tmp_path: Path) -> None:
    """The adapter does not change the embeddings that the picture gives."""
    vision = VisionModel("mistral3", tmp_path)
    change = random_adapter(tmp_path / "adapter", vocabulary_of(vision.model)[0], 0)
    prompt = vision.prompt([picture(20, 9), picture(70, 45)])
    assert prompt.media[0].tokens == 1
    adapters = f"a={tmp_path / 'adapter'}"
    engine = build_engine(ShardConfig(model_path=vision.folder, device="cpu", max_batch_size=6, lora_adapters=adapters))
    assert isinstance(engine, TorchEngine)
    check_all(engine, vision, [prompt], 5)
    driver = Driver(engine, engine.warm_up(limits()))
    stream = driver.admit(prompt.ids, 3, adapter="a", prompt_logprobs=True, **decoded(engine, prompt))
    driver.run()
    untie(vision.model)
    with merged(vision.model, change):
        expected, greedy = vision.reference(prompt, 3)
    assert (torch.tensor(stream.prompt_logprobs[0][1:]) - expected).norm() <= 1e-5 * expected.norm()
    assert stream.tokens == greedy


def test_a_second_turn_encodes_no_picture(engine: TorchEngine, vision: VisionModel, prompts: list[Prompt]) -> None:
    driver = Driver(engine, engine.warm_up(limits()))
    first = prompts[0]
    stream = driver.admit(first.ids, NEW_TOKENS, **decoded(engine, first))
    driver.run()
    second = Prompt((*first.ids, *stream.tokens, 17, 18, 19, 20), first.media)
    expected = vision.greedy(second, NEW_TOKENS)
    assert engine._images is not None
    tower = engine._images.encoder._model
    kept = {name: weight.clone() for name, weight in tower.state_dict().items()}
    with torch.inference_mode():
        for weight in tower.parameters():
            weight.fill_(torch.nan)  # a picture that is encoded now has no finite row
    try:
        size = engine.info.block_size
        blocks = 0 if driver.has_states else len(first.ids) // size
        for computed in {0, min(1, blocks) * size, blocks * size}:  # the second lies in the first picture
            again = driver.admit(
                second.ids,
                NEW_TOKENS,
                chunk=9,
                shared=stream.blocks[: computed // size],
                computed_tokens=computed,
                **decoded(engine, second, computed),
            )
            driver.run()
            assert again.tokens == expected
    finally:
        with torch.inference_mode():
            tower.load_state_dict(kept)


def test_pictures_of_a_form_are_encoded_together(engine: TorchEngine) -> None:
    assert engine._images is not None
    encoder = engine._images.encoder
    files = [picture(*size, seed) for size in SIZES for seed in range(2)]
    inputs = [encoder._inputs(data, 1) for data in files]
    groups: dict[str, list[dict[str, Tensor]]] = {}
    for each in inputs:
        groups.setdefault(str([tensor.shape[1:] for tensor in each.values()]), []).append(each)
    with torch.inference_mode():
        for group in groups.values():
            assert len(group) > 1
            together = encoder.encode(group, 0)
            for each, found in zip(group, together, strict=True):
                (alone,) = encoder.encode([each], 0)
                assert found.shape == alone.shape
                assert (found - alone).norm() <= 1e-5 * alone.norm()
                assert found.untyped_storage().nbytes() == found.nbytes  # it is kept and freed by itself


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionModel, TorchEngine]:
    return small_vision(tmp_path_factory.mktemp("checkpoint"))


def test_a_picture_that_cannot_be_used_fails_its_sequence_alone(small: tuple[VisionModel, TorchEngine]) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    good = vision.prompt([picture(70, 45)])
    broken = replace(good.media[0], data=good.media[0].data[:200])
    short = replace(good.media[0], tokens=good.media[0].tokens - 1)
    cases = {
        "image 1 has another digest than its data": Prompt(good.ids, (broken,)),
        "the placeholders of the images do not fit their sizes": Prompt(good.ids, (short,)),
        "the images of the prompt do not lie in it one after the other": Prompt(good.ids[:8], good.media),
        "a prompt has at most 64 images": Prompt(good.ids, good.media * 65),
    }
    stream = driver.admit(good.ids, NEW_TOKENS, chunk=5, **decoded(engine, good))
    failed = [driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt)) for prompt in cases.values()]
    driver.run()
    assert stream.tokens == vision.greedy(good, NEW_TOKENS)
    for reason, each in zip(cases, failed, strict=True):
        assert each.failure is not None
        assert (each.failure.code, each.failure.message) == (FailureCode.INVALID, reason)
    assert engine.running == 0


def test_a_picture_whose_tokens_see_one_another_must_fit_a_step(tmp_path: Path) -> None:
    vision = VisionModel("gemma3", tmp_path)
    engine = vision_engine(vision)
    prompt = vision.prompt([picture(70, 45)])
    for most, reason in ((15, "an image has 16 tokens, and a step at most 15"), (16, None)):
        driver = Driver(engine, engine.warm_up(replace(limits(), max_batch_prefill_tokens=most)))
        stream = driver.admit(prompt.ids, NEW_TOKENS, chunk=most, **decoded(engine, prompt))
        driver.run()
        if reason is None:
            assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)
        else:
            assert stream.failure is not None
            assert stream.failure.code is FailureCode.INVALID
            assert stream.failure.message == f"{reason}: raise --max-batch-prefill-tokens"


def test_files_that_are_no_picture(small: tuple[VisionModel, TorchEngine], tmp_path: Path) -> None:
    vision, engine = small
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    bomb = bytearray(picture(8, 8))
    bomb[16:24] = (30_000).to_bytes(4, "big") * 2  # the size in the header
    driver = Driver(engine, engine.warm_up(limits()))
    for data in (b"", svg, picture(40, 40, file_format="BMP"), picture(40, 40)[:300], bytes(bomb)):
        good = vision.prompt([picture(40, 40)])
        media = replace(good.media[0], data=data, digest=sha256(data).digest())
        failed = driver.admit(good.ids, NEW_TOKENS, **decoded(engine, Prompt(good.ids, (media,))))
        driver.run()
        assert failed.failure is not None
        assert failed.failure.code is FailureCode.IMAGE
        assert failed.failure.message.startswith("image 1 ")
        assert "\n" not in failed.failure.message


def test_prompts_decode_their_pictures_in_turns_until_they_are_cancelled(
    small: tuple[VisionModel, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    vision, engine = small
    assert engine._images is not None
    encoder, order, submitted = engine._images.encoder, list[bytes](), threading.Event()
    inputs = encoder._inputs

    def decode(data: bytes, number: int) -> object:
        submitted.wait(10)
        order.append(data)
        if data == long[0][0]:
            waiting[0].cancel()
        return inputs(data, number)

    monkeypatch.setattr(encoder, "_inputs", decode)
    long = [[picture(30, 40, seed) for seed in seeds] for seeds in (range(10, 15), range(20, 25))]
    short = picture(30, 40, 30)
    prompts = [vision.prompt(files) for files in (*long, [short])]
    new = [NewSequence(0, prompt.ids, Stopping(max_new_tokens=1), media=prompt.media) for prompt in prompts]
    assert engine.decode_images is not None
    waiting = [engine.decode_images(each) for each in new]
    submitted.set()
    wait(waiting[1:])
    assert order.index(short) <= 3  # behind one of each other prompt, and those that were running
    assert all(data in order for data in long[1])
    assert not set(long[0][1:]) & set(order)


def test_a_session_decodes_the_pictures_of_its_orders(small: tuple[VisionModel, TorchEngine]) -> None:
    vision, engine = small
    engine.warm_up(limits())
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    tokens: list[int] = []

    def emit(report: StepResult) -> None:
        tokens.extend(report.token_ids)
        if report.finished or report.failed:
            session.end()

    session = EngineSession(engine, emit, StepMonitor())
    blocks = tuple(range(8))
    new = NewSequence(0, prompt.ids, Stopping(max_new_tokens=NEW_TOKENS), blocks=blocks, media=prompt.media)
    session.order(Orders(1, placements=(new,), prefill=((0, len(prompt.ids)),)))
    session.run()
    assert tokens == vision.greedy(prompt, NEW_TOKENS)


def test_a_pixel_that_waits_has_a_byte_for_each_color(vision: VisionModel, engine: TorchEngine) -> None:
    assert engine._images is not None
    encoder, file = engine._images.encoder, picture(90, 50)
    begun, expected = encoder._inputs(file, 1), vision._inputs([file])
    assert begun["pixel_values"].dtype == torch.uint8
    ended = encoder._pixels.ended(begun, torch.device("cpu"))
    assert (ended["pixel_values"] - expected["pixel_values"]).abs().max() <= 1e-6


@pytest.mark.parametrize("file_format", [full("JPEG"), "WEBP", full("GIF")])
def test_formats(small: tuple[VisionModel, TorchEngine], file_format: str) -> None:
    vision, engine = small
    driver = Driver(engine, engine.warm_up(limits()))
    prompt = vision.prompt([picture(50, 60, file_format=file_format)])
    stream = driver.admit(prompt.ids, NEW_TOKENS, **decoded(engine, prompt))
    driver.run()
    assert stream.tokens == vision.greedy(prompt, NEW_TOKENS)


def test_a_photo_is_upright(small: tuple[VisionModel, TorchEngine]) -> None:
    images = small[1]._images
    assert images is not None
    stored = Image.open(BytesIO(picture(71, 45)))
    for orientation in range(1, 9):
        exif, photo, upright = Image.Exif(), BytesIO(), BytesIO()
        exif[0x0112] = orientation
        stored.save(photo, "JPEG", exif=exif)
        ImageOps.exif_transpose(Image.open(photo)).save(upright, "PNG")
        found, expected = (images.encoder._inputs(file.getvalue(), 1) for file in (photo, upright))
        assert torch.equal(found["pixel_values"], expected["pixel_values"])
        assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])


def test_a_model_without_its_encoder_serves_texts(small: tuple[VisionModel, TorchEngine]) -> None:
    vision, _ = small
    engine = build_engine(
        ShardConfig(model_path=vision.folder, device="cpu", max_batch_size=6, max_batch_image_tokens=0)
    )
    assert (engine.info.max_images, engine.decode_images) == (0, None)
    prompt = Prompt((9, 8, 7, 6), ())
    assert Driver(engine, engine.warm_up(limits())).alone(prompt.ids, NEW_TOKENS) == vision.greedy(prompt, NEW_TOKENS)
