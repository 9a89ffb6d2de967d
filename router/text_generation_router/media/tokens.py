"""The tokens of images of one model: read from its folder, put into prompts."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from text_generation_common.model_files import MAX_CONFIG_BYTES, find_file, read_file
from text_generation_router.errors import InvalidRequest
from text_generation_router.media.headers import Size
from text_generation_router.media.layouts import FAMILIES, ImageFamily, ModelFiles
from text_generation_router.request import ImageFile, PlacedImage, TokenId
from text_generation_router.text.tokenizer import Tokenizer

MARK = "![]("
MARKDOWN = re.compile(r"!\[\]\(([^()\s]{1,2048}|data:image/[a-z+.-]{1,32};base64,[A-Za-z0-9+/=]+)\)")
"""TGI's form of an image in a text: a URL or a `data:` URI."""


class ReadImage(NamedTuple):
    image: ImageFile
    size: Size


class ImageTokens:
    """The form of images in the prompts of a model."""

    def __init__(self, family: ImageFamily, files: ModelFiles, tokenizer: Tokenizer) -> None:
        """Raises KeyError or ValueError for files that do not tell it."""
        config = files.config
        self._tokenizer = tokenizer
        self._image_id: int = config["image_token_id"] if "image_token_id" in config else config["image_token_index"]
        token = tokenizer.token_text(self._image_id)
        self.written = family.written.format(token)
        """The text of an image in a prompt."""
        self._spelled = family.spelled.format(token)
        self._layout = family.layout(files)
        self._texts: dict[str, array[TokenId]] = {}
        """Tokens of the marks in layouts."""

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> Self | None:
        """Read the files of a model; None if its type is unknown here.

        Raises ModelFileError, KeyError or ValueError for files that cannot be used.
        """
        config = _read(folder, "config.json")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            return None
        processor = _read(folder, "processor_config.json")
        images = _read(folder, "preprocessor_config.json") or processor.get("image_processor") or {}
        return cls(family, ModelFiles(config, processor, images), tokenizer)

    def spelled(self, text: str) -> str:
        """Return a prompt as it is tokenized."""
        return text.replace(self.written, self._spelled) if self._spelled else text

    def split(self, text: str) -> tuple[str, list[str]]:
        """Return a text with the model's text for each image in TGI's form, and the sources of these images."""
        return MARKDOWN.sub(lambda _: self.written, text), MARKDOWN.findall(text)

    def place(
        self, ids: Sequence[TokenId], pictures: Sequence[ReadImage]
    ) -> tuple[Sequence[TokenId], tuple[PlacedImage, ...]]:
        """Return a prompt with the tokens of its images, each in the place of the one image token of `ids`. Raises InvalidRequest."""
        ids = array("I", ids)
        if (marks := ids.count(self._image_id)) != len(pictures):
            token = self._tokenizer.token_text(self._image_id)
            raise InvalidRequest(
                f"the prompt has {marks} places of images for {len(pictures)} images: its text must not have {token!r}, "
                "and the chat template must have a place for each image"
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
