"""ImageTokens: the tokens of images of one model, read from its folder and put into prompts.

ImageReader: from the URLs of a request to its images, within limits of bytes, pixels and number, of the request and of tenants.
"""

from __future__ import annotations

import binascii
import re
import weakref
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from text_generation_common.model_files import MAX_CONFIG_BYTES, find_file, read_file
from text_generation_router.admission_queue import PendingWork
from text_generation_router.chat.conversation import Json, image_part, join_parts
from text_generation_router.config import RouterConfig
from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.media.fetch import MAX_URL, Fetcher, too_large
from text_generation_router.media.headers import SIZE, BadImage, Size
from text_generation_router.media.layouts import FAMILIES, ImageFamily, ModelFiles
from text_generation_router.permits import Permits
from text_generation_router.request import ImageFile, PlacedImage, TenantId, TokenId
from text_generation_router.sandbox.pool import Sandbox, SandboxBroken, SandboxError
from text_generation_router.text.tokenizer import Tokenizer

MARK = "![]("
MARKDOWN = re.compile(
    rf"!\[\]\((?:([^()\s]{{1,{MAX_URL}}}|(?i:data:image/[a-z+.-]{{1,32}};base64,)[A-Za-z0-9+/=]+)\))?"
)
"""MARK, and the rest of TGI's form of an image in a text, if it follows: a URL or a `data:` URI."""

MAX_BYTES = 20_000_000
"""Bytes of the file of an image."""
MAX_REQUEST_BYTES = 48_000_000
"""Bytes of all images of a request, counted once for each of its answers."""
MAX_PIXELS = 1 << 25
"""Pixels of an image."""
MAX_MARKS = 1000
"""MARKs of a request that are looked at. A body has room for millions, and no stream goes on meanwhile."""
MAX_HELD_BYTES = 1 << 30
"""Bytes of images of all requests. A tenant below its share of them may exceed the limit, up to twice its value."""
INLINE_CHARACTERS = 1 << 17
"""Characters of a `data:` URI that are decoded at once: a millisecond. A longer one is decoded on a thread."""
MEASURE_S = 1.0
"""CPU time of a worker for one image."""
WORKER_BYTES = 128 << 20
"""Heap of a worker."""

_DATA = re.compile(r"data:[\w.+/-]{0,100}(?:;[\w.+=/-]{1,100}){0,4},", re.ASCII | re.IGNORECASE)


UNUSABLE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError
"""Errors of files whose values have other types or sizes than a layout needs."""


class ReadImage(NamedTuple):
    image: ImageFile
    size: Size


class ImageTokens:
    """The form of images in the prompts of a model."""

    def __init__(self, family: ImageFamily, files: ModelFiles, tokenizer: Tokenizer) -> None:
        """Raises one of UNUSABLE for files that do not tell it."""
        config = files.config
        self._tokenizer = tokenizer
        self._image_id: int = config["image_token_id"] if "image_token_id" in config else config["image_token_index"]
        self._token = tokenizer.token_text(self._image_id)
        self.written = family.written.format(self._token)
        """The text of an image in a prompt."""
        self._spelled = family.spelled.format(self._token)
        self._layout = family.layout(files)
        self._texts: dict[str, array[TokenId]] = {}
        """Tokens of the marks in layouts."""

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> Self | None:
        """Read the files of a model; None if its type is unknown here.

        Raises one of UNUSABLE for files that cannot be used.
        """
        config = _read(folder, "config.json")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            return None
        processor = _read(folder, "processor_config.json")
        # As in transformers, whose version 5 may write it beside an older preprocessor_config.json.
        inner = processor.get("image_processor")
        images = inner if isinstance(inner, dict) else _read(folder, "preprocessor_config.json")
        return cls(family, ModelFiles(config, processor, images), tokenizer)

    def spelled(self, text: str) -> str:
        """Return a prompt as it is tokenized."""
        return text.replace(self.written, self._spelled) if self._spelled else text

    def texts_around(self, text: str) -> list[str]:
        """Return the texts before, between and after the image tokens of a prompt, as they are tokenized."""
        return self.spelled(text).split(self._token)

    def split(self, text: str) -> tuple[str, list[str]]:
        """Return a text with the model's text for each image in TGI's form, and the sources of these images."""
        pieces = _divided(text, MAX_MARKS)
        return self.written.join(pieces[::2]), pieces[1::2]

    def place(
        self, ids: Sequence[TokenId], pictures: Sequence[ReadImage]
    ) -> tuple[Sequence[TokenId], tuple[PlacedImage, ...]]:
        """Return a prompt with the tokens of its images, each in the place of the one image token of `ids`. Raises InvalidRequest."""
        ids = array("I", ids)
        if (marks := ids.count(self._image_id)) != len(pictures):
            other = f" nor {self.written!r}" if self._spelled else ""
            raise InvalidRequest(
                f"the prompt has {marks} places of images for {len(pictures)} images: its text must not have {self._token!r}"
                f"{other}, and the chat template must have a place for each image"
            )
        prompt, media, start = array("I"), [], 0
        for image, size in pictures:
            at = ids.index(self._image_id, start)
            prompt += ids[start:at]
            offset, start = len(prompt), at + 1
            for piece in self._layout(size):
                prompt += array("I", [self._image_id]) * piece if isinstance(piece, int) else self._encode(piece)
            media.append(PlacedImage(offset, len(prompt) - offset, image))
        return prompt + ids[start:] if media else ids, tuple(media)

    def _encode(self, text: str) -> array[TokenId]:
        if text not in self._texts:
            self._texts[text] = array("I", self._tokenizer.encode_ids(text, add_special_tokens=False))
        return self._texts[text]


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a model; empty without the file."""
    try:
        value = orjson.loads(read_file(find_file(folder, name), MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


class ImageReader:
    """Reads the images of requests for a model that takes some."""

    def __init__(self, tokens: ImageTokens, max_images: int, config: RouterConfig, stage: PendingWork) -> None:
        """`max_images`: of a request. `stage`: the bound of waiting work."""
        self.tokens = tokens
        self._max_images = max_images
        self._fetcher = Fetcher(config.allowed_media_domains, min(config.max_image_fetch_size, MAX_BYTES))
        self._held = Permits(max(MAX_HELD_BYTES // config.http_workers, MAX_REQUEST_BYTES))
        """The bytes of images that are referred to, by tenant."""
        self._sandbox = Sandbox(
            "text_generation_router.media.headers:measure",
            {"max_pixels": MAX_PIXELS},
            workers=2,
            timeout_s=MEASURE_S,
            memory_bytes=WORKER_BYTES,
            max_output=SIZE.size,
            stage=stage,
        )
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._running.enter_async_context(self._fetcher)
        await self._running.enter_async_context(self._sandbox)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    def divided(self, messages: Sequence[Json]) -> list[Json]:
        """Return the messages of a chat. In users' texts, images in TGI's form are parts, but for URLs that are not fetched."""
        shown, left = list[Json](), MAX_MARKS
        for message in messages:
            text = message.get("content")
            if left > 0 and message["role"] == "user" and isinstance(text, str) and MARK in text:
                pieces: list[str | Json] = [*_divided(text, left)]
                for at, source in enumerate(map(str, pieces[1::2])):
                    is_served = source[:11].lower() == "data:image/" or self._fetcher.allows(source)
                    pieces[2 * at + 1] = image_part(source) if is_served else f"{MARK}{source})"
                message = message | {"content": join_parts([piece for piece in pieces if piece])}
                left -= text.count(MARK)
            shown.append(message)
        return shown

    async def read(self, sources: Sequence[str], tenant: TenantId, count: int = 1) -> list[ReadImage]:
        """Return the images at these URLs or `data:` URIs, for `count` answers.

        Raises InvalidRequest, Overloaded, CannotKeepUp, Unhealthy.
        """
        if len(sources) > self._max_images:
            raise InvalidRequest(f"a request may have at most {self._max_images} images. Given: {len(sources)}")
        pictures, size = list[ReadImage](), 0
        for number, source in enumerate(sources, 1):
            try:
                picture = await self._read(source, tenant)
                if (size := size + count * len(picture.image.data)) > MAX_REQUEST_BYTES:
                    raise BadImage(f"with it, the images of all answers have more than {MAX_REQUEST_BYTES} bytes")
            except BadImage as error:
                raise InvalidRequest(f"image {number} cannot be read: {error}") from None
            pictures.append(picture)
        return pictures

    async def _read(self, source: str, tenant: TenantId) -> ReadImage:
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._held.acquire(size, tenant)
            held += size

        try:
            if source[:5].lower() == "data:":  # the case of a scheme does not count: RFC 3986
                large = len(source) > INLINE_CHARACTERS
                image = await run_in_thread_if_large(lambda: _image(_decoded(source)), large=large)
                hold(len(image.data))
            else:
                data = await self._fetcher.fetch(source, hold)
                image = await run_in_thread_if_large(lambda: _image(data), large=len(data) > INLINE_CHARACTERS)
        except BaseException:
            self._held.give_back(held, tenant)
            raise
        weakref.finalize(image, self._held.give_back, held, tenant).atexit = False
        try:
            width, height = SIZE.unpack(await self._sandbox.call(image.data, tenant))
        except SandboxBroken as error:
            raise Unhealthy("images cannot be read now") from error
        except SandboxError as error:
            raise BadImage(str(error)) from None
        return ReadImage(image, (width, height))


def _divided(text: str, most: int) -> list[str]:
    """Return texts and, between them, the sources of images in TGI's form; after the first `most` MARKs, no more of these."""
    pieces, end = list[str](), 0
    for found in islice(MARKDOWN.finditer(text), most):
        if found[1]:
            pieces += text[end : found.start()], found[1]
            end = found.end()
    return [*pieces, text[end:]]


def _decoded(source: str) -> bytes:
    """Return the content of a `data:` URI in base64. Raises BadImage."""
    head = _DATA.match(source)
    if head is None or not head[0].lower().endswith(";base64,"):
        raise BadImage("its `data:` URI is not in base64")
    if (len(source) - head.end()) * 3 // 4 > MAX_BYTES:
        raise too_large(MAX_BYTES)
    try:
        starts = range(head.end(), len(source), INLINE_CHARACTERS)  # between two pieces, the event loop runs
        pieces = (source[start : start + INLINE_CHARACTERS] for start in starts)
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError:
        raise BadImage("its `data:` URI is not valid base64") from None


def _image(data: bytes) -> ImageFile:
    return ImageFile(sha256(data).digest(), data)
