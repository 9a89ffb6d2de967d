"""The image part of a model of text and images: the library's image processor, vision tower and projector, with the checkpoint's weights.

Images are decoded in child processes and processed by Pillow, on threads beside the engine, and encoded on the engine's device.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_common.progress import phase
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, NewSequence
from text_generation_shard.engines.torch.engine.prompt_images import (
    ImageError,
    Inputs,
    Picture,
    PromptImages,
    RowCache,
    UnreadableImage,
)
from text_generation_shard.engines.torch.models.huggingface.config import unquantized
from text_generation_shard.engines.torch.models.huggingface.image_rope import use_kernel
from text_generation_shard.engines.torch.models.huggingface.library import (
    LibraryConfig,
    LibraryModel,
    config_from_json,
    image_part,
    image_processor,
    silence,
)
from text_generation_shard.engines.torch.models.huggingface.load import loaded, own_memory, random_model
from text_generation_shard.engines.torch.models.huggingface.pixels import PixelSteps
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint, text_name
from text_generation_shard.grammar import lower_priority
from text_generation_shard.image_files import ImageFiles
from text_generation_shard.json_object import JsonObject

WORKERS = min(max(len(os.sched_getaffinity(0)) // 2, 2), 8)
"""Images that are decoded at a time, in processes."""
MAX_GRIDS = 1 << 14
"""Most images of which the size in patches is kept."""
TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
"""Begins of the names of tensors of the text part, in the names of a model of text."""
CACHE_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Memory for encoded images, by kind of device. 2²⁸ bytes are 32 thousand tokens of an 8B model."""
LENGTHS_ON_DEVICE = ("glm4v", "glm46v", "glm4v_moe")
"""Model types whose embedding computes with the lengths of sequences."""
LARGEST_SIDE = {"cpu": 224, "cuda": 2048}
"""Sides of the square image whose encoding is measured at the start."""


class LibraryImages:
    """Implements `ImageEncoder`."""

    def __init__(self, model: LibraryModel, processor: Callable[..., Any], device: torch.device) -> None:
        self._model = model
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.forward = partial(_multiply, module)  # type: ignore[method-assign]
        if device.type == "cuda":
            use_kernel(model)
        self._pixels = PixelSteps(processor)
        self._device = device
        self._token_id = int(model.config.image_token_id)
        self.rotates = hasattr(model.base_model, "get_rope_index")
        self.cached = RowCache(CACHE_BYTES[device.type])
        self._grids: dict[bytes, Tensor] = {}
        """int64 [1, 3]: the size of images in patches, for their rotary positions."""
        self._files = LifoQueue[ImageFiles]()
        """The decoders that are free."""
        self._decoders = [ImageFiles(_warn) for _ in range(WORKERS)]
        for each in self._decoders:
            self._files.put(each)
        self._processing = Lock()
        """One image is processed at a time: more take the interpreter from the thread that encodes. Of 32 requests with images of
        1,000 × 1,000 pixels at once, the last one had its first token after 1,340 ms, after 1,480 with two and 1,550 with eight."""
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="image", initializer=lower_priority)

    def decode(self, new: NewSequence) -> Future[PromptImages]:
        images: Future[PromptImages] = Future()
        self._pool.submit(self._advance, self._decoded(new), ref(images))
        return images

    def encode(self, images: Sequence[Inputs], tokens: int) -> list[Tensor]:
        # The library drops the dimension of one row of Pixtral's, not of two.
        given = [*images, *images] if tokens == 1 else images
        dtype, parts = self._model.dtype, [self._pixels.ended(each, self._device) for each in given]
        inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
        if "image_grid_thw" in inputs and self._model.config.model_type not in LENGTHS_ON_DEVICE:
            # Each layer reads the lengths of sequences; in the device's memory it would wait for the layer before.
            lengths = [int(each["image_grid_thw"].prod()) for each in given]
            inputs["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        output = self._model.get_image_features(**inputs)
        added = getattr(output, "deepstack_features", None) or ()
        rows = output.pooler_output
        if rows is None:  # Llama 4 projects them later
            rows = self._model.multi_modal_projector(output.last_hidden_state)
        counts = _counts(rows, given)
        levels = [torch.split(_rows(each), counts) for each in (rows, *added)]
        # Those of each image have memory of their own, which is freed with them.
        return [torch.stack(each) for each in zip(*levels, strict=True)][: len(images)]

    def largest(self) -> Inputs:
        side = LARGEST_SIDE[self._device.type]
        return self._pixels.begun(Image.new("RGB", (side, side)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for each in self._decoders:  # what is decoded by one of them fails
            each.close()

    def _advance(
        self,
        pictures: Generator[Future[Inputs], None, PromptImages],
        reference: "ref[Future[PromptImages]]",
        _: object = None,
    ) -> None:
        """Decode the next picture of a prompt when it is its turn. A prompt that is cancelled ends."""
        images = reference()  # which holds the picture that calls this: memory that only a search for cycles would free
        if images is None or images.cancelled():
            pictures.close()
            return
        with suppress(InvalidStateError):
            try:
                next(pictures).add_done_callback(partial(self._advance, pictures, reference))
            except StopIteration as end:
                images.set_result(end.value)
            except Exception as error:  # noqa: BLE001 – the engine sees it in the future
                images.set_exception(error.with_traceback(None))

    def _decoded(self, new: NewSequence) -> Generator[Future[Inputs], None, PromptImages]:
        """Decode the pictures of a prompt, each when the generator goes on. Raises ImageError."""
        ids = np.array(new.prompt, dtype=np.int64)
        is_image = np.zeros(len(ids), dtype=bool)
        pictures: list[Picture] = []
        for number, media in enumerate(new.media, 1):
            span = slice(media.offset, media.end)
            is_image[span] = ids[span] == self._token_id
            if hashlib.sha256(media.data).digest() != media.digest:
                raise ImageError(f"image {number} has another digest than its data")
            inputs = cache(partial(self._pool.submit, self._inputs, media.data, number))
            is_computed = media.end <= new.computed_tokens or media.digest in self.cached
            if not is_computed or (self.rotates and media.digest not in self._grids):
                yield inputs()
                values = inputs().result()
                if self.rotates:
                    self._keep_grid(media.digest, values["image_grid_thw"])
            places = media.offset + np.flatnonzero(is_image[span])
            pictures.append(Picture(media.digest, places, media.offset, media.end, inputs))
        positions, shift = self._rotary_positions(ids, is_image, [each.digest for each in new.media])
        return PromptImages(pictures, positions, shift)

    def _keep_grid(self, digest: bytes, grid: Tensor) -> None:
        self._grids[digest] = grid
        if len(self._grids) > MAX_GRIDS:
            self._grids.pop(next(iter(self._grids)), None)

    def _inputs(self, data: bytes, number: int) -> Inputs:
        """Return the arguments of the encoder for a file. Raises UnreadableImage."""
        try:
            files = self._files.get()
            try:
                size, pixels = files.decode(data)
            finally:
                self._files.put(files)
            with self._processing:
                return self._pixels.begun(Image.frombuffer("RGB", size, pixels, "raw", "RGB", 0, 1))
        except Exception as error:  # noqa: BLE001 – decoders and processors raise errors of many kinds
            raise UnreadableImage(f"image {number} cannot be read: {one_line(error)}") from None

    def _rotary_positions(
        self, ids: NDArray[np.int64], is_image: NDArray[np.bool_], digests: Sequence[bytes]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """Return the rotary positions [3, prompt], and the shift of those that follow."""
        if not self.rotates:
            return None, 0
        try:
            positions, shifts = self._model.model.get_rope_index(
                torch.from_numpy(ids).unsqueeze(0),
                mm_token_type_ids=torch.from_numpy(is_image).int().unsqueeze(0),
                image_grid_thw=torch.cat([self._grids[digest] for digest in digests]),
            )
        except (RuntimeError, StopIteration):
            raise ImageError("the placeholders of the images do not fit their sizes") from None
        axes: NDArray[np.int64] = positions[:, 0].numpy()
        return axes, int(shifts[0])


def _multiply(patches: nn.Conv3d, pixels: Tensor) -> Tensor:
    """Return the convolution of `pixels`, which is a product if they have the size of its kernel.

    An image of 1,000 × 1,000 pixels took 23.7 instead of 25.1 ms in the encoder of Qwen3-VL-8B on one H200.
    """
    if pixels.shape[2:] != patches.kernel_size:
        return type(patches).forward(patches, pixels)
    return nn.functional.linear(pixels.flatten(1), patches.weight.flatten(1), patches.bias)[..., None, None, None]


@cache
def _warn(refused: str) -> None:
    """Log once what the kernel refused."""
    log.warning("decoders of images are not fully confined", refused=refused)


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the rows [tokens, hidden] of images, or of their tiles, in order."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])


def _counts(features: Tensor | Sequence[Tensor], images: Sequence[Inputs]) -> list[int]:
    """Return the number of rows of each image."""
    if len(features) == len(images):  # one part for each
        return [part.shape[:-1].numel() for part in features]
    assert isinstance(features, Tensor)  # [tiles, tokens, hidden]
    return [each["pixel_values"].shape[0] * features.shape[1] for each in images]


def load_images(config: ShardConfig, dtype: torch.dtype, device: torch.device) -> LibraryImages:
    """Load the image part of the model in a folder. Raises EngineError with a one-line message."""
    folder = Path(config.model_path)
    whole, model_class = _image_class(folder)
    try:
        with warnings.catch_warnings(action="ignore"), phase("loading the image encoder"):
            processor = image_processor(folder, whole)
            if config.load_format == "dummy":
                model = random_model(model_class, whole, device, dtype)
            else:
                checkpoint = Checkpoint(folder)
                names = [name for name in checkpoint.names if not text_name(name).startswith(TEXT)]
                model = loaded(folder, model_class, whole, checkpoint.map(names), dtype)
                model = own_memory(model, device)
            return LibraryImages(model, processor, device)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 – the library raises errors of many kinds
        reason = one_line(error)
        raise EngineError(
            f"{folder}: its image encoder cannot be loaded: {reason}; without images: --max-batch-image-tokens 0"
        ) from None


def image_bytes(folder: Path, dtype: torch.dtype, device: torch.device) -> int:
    """Return the memory of the image part of the model in a folder, and of the images that it keeps."""
    whole, model_class = _image_class(folder)
    with torch.device("meta"):
        model = model_class(whole)
    weights = sum(int(each.numel()) for each in model.parameters())
    return weights * dtype.itemsize + CACHE_BYTES[device.type]


def _image_class(folder: Path) -> tuple[LibraryConfig, LibraryModel]:
    silence()
    raw = JsonObject.read(folder)
    try:
        whole = config_from_json(unquantized(raw.values))
        return whole, image_part(whole)
    except Exception as error:  # noqa: BLE001 – the library checks values in many ways
        raise raw.error(f"the library does not take it: {one_line(error)}") from None
