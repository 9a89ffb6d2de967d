"""The tokens of images against the processors of transformers, over odd sizes, alone and two in a prompt."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from PIL import Image as PilImage
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from text_generation_router.errors import InvalidRequest
from text_generation_router.media.reader import UNUSABLE, ImageTokens, ReadImage
from text_generation_router.request import ImageFile
from text_generation_router.text.tokenizer import Tokenizer

SPECIAL = (
    *("<image>", "<|image|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|begin_of_image|>"),
    *("<|end_of_image|>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "[IMG]", "[IMG_BREAK]"),
    *("[IMG_END]", "<fake_token_around_image>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<image|>", "<|image>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 6) for column in range(1, 6)),
)
SIZES = [(1, 1), (7, 40), (56, 28), (333, 640), (640, 333), (449, 448), (199, 201), (901, 77), (30, 901), (1700, 1300)]


@pytest.fixture(scope="module")
def library_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level tokenizer in which newlines merge, as those of Gemma and SmolLM do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ĊĊ", "ĊĊĊ"])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def processor(module: str, name: str, **own: object) -> Callable[[Any], Any]:
    """Return a function that makes what the library's processor reads of itself; `own` has its other attributes."""
    kind = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), name)

    def make(images: Any) -> Any:  # noqa: ANN401 - a class of the library
        made = SimpleNamespace(image_processor=images, images_kwargs=getattr(kind, "images_kwargs", {}), **own)
        for method in ("_get_number_of_features", "_get_unpadded_features", "_prompt_split_image"):
            if hasattr(kind, method):
                setattr(made, method, getattr(kind, method).__get__(made))
        made.replace_image_token = kind.replace_image_token.__get__(made)
        return made

    return make


QWEN = processor("qwen2_vl", "Qwen2VLProcessor", image_token="<|image_pad|>")
CLIP: dict[str, Any] = {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}}


def pixtral(merge: int) -> Callable[[Any], Any]:
    """Return the same for Pixtral, whose processor needs torchvision: rows of the library's sizes."""

    def replace(inputs: Any, index: int) -> str:  # noqa: ANN401 - a class of the library
        height, width = (side // (14 * merge) for side in inputs["image_sizes"][index])
        row = "[IMG]" * width
        return (row + "[IMG_BREAK]") * (height - 1) + row + "[IMG_END]"

    sizes = {"patch_size": 14, "spatial_merge_size": merge, "images_kwargs": {"patch_size": 14 * merge}}
    return lambda images: SimpleNamespace(replace_image_token=replace, **sizes)


TILES: dict[str, Any] = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
    "image_seq_len": 4,
}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any], Callable[[Any], Any], str]] = {
    "qwen2_5_vl": ({}, "qwen2_vl", "Qwen2VL", {}, QWEN, "<|image_pad|>"),
    "qwen2_vl": ({}, "qwen2_vl", "Qwen2VL", {"min_pixels": 200000, "max_pixels": 400000}, QWEN, "<|image_pad|>"),
    "qwen3_vl": (
        {},
        "qwen2_vl",
        "Qwen2VL",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 160000}},
        QWEN,
        "<|image_pad|>",
    ),
    "glm46v": (
        {},
        "glm46v",
        "Glm46V",
        {"size": {"shortest_edge": 200000, "longest_edge": 400000}, "min_pixels": 3136, "max_pixels": 9408},
        processor("glm46v", "Glm46VProcessor", image_token="<|image|>"),
        "<|image|>",
    ),
    "glm4v_moe": (
        {},
        "glm4v",
        "Glm4v",
        {"size": {"shortest_edge": 12544, "longest_edge": 800000}},
        processor("glm4v", "Glm4vProcessor", image_token="<|image|>"),
        "<|image|>",
    ),
    "gemma3": (
        {},
        "gemma3",
        "Gemma3",
        {"do_pan_and_scan": True},
        processor(
            "gemma3",
            "Gemma3Processor",
            full_image_sequence="\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n",
        ),
        "<image_soft_token>",
    ),
    "gemma4": (
        {},
        "gemma4",
        "Gemma4",
        {"max_soft_tokens": 70},
        processor("gemma4", "Gemma4Processor", boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>"),
        "<|image|>",
    ),
    "mistral3": (
        {"spatial_merge_size": 2},
        "pixtral",
        "Pixtral",
        {"size": {"longest_edge": 700}, "patch_size": 14},
        pixtral(2),
        "[IMG]",
    ),
    "llava-pixtral": (
        {"vision_config": {"model_type": "pixtral", "patch_size": 14}},
        "pixtral",
        "Pixtral",
        {"size": {"longest_edge": 300}, "patch_size": 14},
        pixtral(1),
        "[IMG]",
    ),
    "llava": (
        CLIP,
        "clip",
        "CLIP",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        processor(
            "llava",
            "LlavaProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
        "<image>",
    ),
    "llava_next": (
        CLIP,
        "llava_next",
        "LlavaNext",
        {
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": PINPOINTS,
        },
        processor(
            "llava_next",
            "LlavaNextProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
        "<image>",
    ),
    "llava_onevision": (
        {},
        "llava_onevision",
        "LlavaOnevision",
        {
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56 * row, 56 * column] for row in range(1, 7) for column in range(1, 7)],
        },
        processor(
            "llava_onevision",
            "LlavaOnevisionProcessor",
            image_token="<image>",
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_9",
        ),
        "<image>",
    ),
    "idefics3": (
        {},
        "idefics3",
        "Idefics3",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}},
        processor("idefics3", "Idefics3Processor", **TILES),
        "<image>",
    ),
    "smolvlm": (
        {"scale_factor": 2, "vision_config": {"patch_size": 7}},
        "smolvlm",
        "SmolVLM",
        {"size": {"longest_edge": 140}, "max_image_size": {"longest_edge": 28}},
        processor("smolvlm", "SmolVLMProcessor", **TILES),
        "<image>",
    ),
    "internvl": (
        {},
        "got_ocr2",
        "GotOcr2",
        {"size": {"height": 28, "width": 28}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12},
        processor(
            "internvl",
            "InternVLProcessor",
            start_image_token="<img>",
            end_image_token="</img>",
            image_token="<IMG_CONTEXT>",
            image_seq_length=9,
        ),
        "<IMG_CONTEXT>",
    ),
}
SAVED = (
    "image_seq_len",
    "image_seq_length",
    "num_additional_image_tokens",
    "num_image_tokens",
    "patch_size",
    "spatial_merge_size",
    "vision_aspect_ratio",
    "vision_feature_select_strategy",
)
"""Attributes of processors that are in processor_config.json."""


def load(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any], **files: object) -> ImageTokens:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    loaded = ImageTokens.load(folder, Tokenizer(tokenizer))
    assert loaded is not None
    return loaded


def placed(tokens: ImageTokens, library: tokenizers.Tokenizer, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    ids = library.encode(tokens.spelled(text), add_special_tokens=False).ids
    return list(tokens.place(ids, [ReadImage(ImageFile(b"", b""), size) for size in sizes])[0])


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_the_librarys_processor(
    case: str, library_tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    config, module, name, options, make, token = CASES[case]
    pil = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    images = getattr(pil, f"{name}ImageProcessorPil")(do_normalize=False, resample=0, **options)
    library = make(images)
    saved = {key: getattr(library, key) for key in SAVED if hasattr(library, key)}
    if case == "smolvlm":  # it follows from the others
        del saved["image_seq_len"]
    config = config | {"model_type": case.partition("-")[0], "image_token_id": library_tokenizer.token_to_id(token)}
    own = json.loads(images.to_json_string())
    tokens = load(tmp_path, library_tokenizer, config, processor_config=saved, preprocessor_config=own)
    pairs = [[size] for size in SIZES]
    if case != "llava_onevision":  # served with one image
        pairs += [[SIZES[3], SIZES[-2]], [SIZES[1], SIZES[1]]]
    for sizes in pairs:
        text = "".join(f"See\n{tokens.written}\nand " for _ in sizes) + "say."
        pictures = [PilImage.new("RGB", size) for size in sizes]
        nested = module in ("gemma3", "gemma4", "idefics3", "smolvlm", "llava_onevision")
        inputs = images([pictures] if nested else pictures, **library.images_kwargs)
        replacements = [library.replace_image_token(inputs, index) for index in range(len(sizes))]
        before = {"gemma3": "<start_of_image>"}.get(case, token)
        parts = text.split(before)
        whole = parts[0] + "".join(new + rest for new, rest in zip(replacements, parts[1:], strict=True))
        expected = library_tokenizer.encode(whole, add_special_tokens=False).ids
        assert placed(tokens, library_tokenizer, text, sizes) == expected, sizes


@pytest.mark.parametrize(
    ("size", "most", "columns", "rows"),
    [
        *(((395, 7), 5, 5, 1), ((386, 40), 5, 5, 1), ((232, 8), 16, 9, 1), ((1, 1), 16, 1, 1), ((56, 55), 16, 2, 2)),
        *(((1971, 293), 16, 8, 2), ((394, 1560), 16, 2, 8), ((1728, 1412), 5, 2, 2), ((13, 283), 5, 1, 5)),
    ],
)
def test_the_tiles_of_llama_4_are_those_of_the_library(  # whose processor needs torchvision: these were computed with it
    size: tuple[int, int],
    most: int,
    columns: int,
    rows: int,
    library_tokenizer: tokenizers.Tokenizer,
    tmp_path: Path,
) -> None:
    config = {"model_type": "llama4", "image_token_index": library_tokenizer.token_to_id("<|patch|>")}
    images = {"size": {"height": 28, "width": 28}, "max_patches": most}
    config |= {"vision_config": {"patch_size": 7, "pixel_shuffle_ratio": 0.5}}
    tokens = load(tmp_path, library_tokenizer, config, preprocessor_config=images)
    tile = "<|patch|>" * 4
    row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    image = "<|image_start|>" + (row * rows if rows * columns > 1 else "") + f"<|image|>{tile}<|image_end|>"
    expected = library_tokenizer.encode(f"See {image} say.").ids
    assert placed(tokens, library_tokenizer, "See <|image|> say.", [size]) == expected


def test_a_text_with_other_places_than_images_is_refused(
    library_tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    token = library_tokenizer.token_to_id("<|image|>")
    tokens = load(tmp_path, library_tokenizer, {"model_type": "glm4v", "image_token_id": token})
    for text, images in (("<|image|>", 0), ("", 1), ("<|image|><|image|>", 1)):
        with pytest.raises(InvalidRequest, match="its text must not have"):
            placed(tokens, library_tokenizer, text, [(9, 9)] * images)
    assert placed(tokens, library_tokenizer, "A", []) == library_tokenizer.encode("A").ids
    config = {"model_type": "gemma3", "image_token_id": library_tokenizer.token_to_id("<image_soft_token>")}
    tokens = load(tmp_path, library_tokenizer, config)
    with pytest.raises(InvalidRequest, match="must not have '<image_soft_token>' nor '<start_of_image>', and"):
        placed(tokens, library_tokenizer, "<start_of_image>", [])


def test_a_model_that_does_not_tell_its_sizes_is_refused(
    library_tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(KeyError, match="patch_size"):
        load(tmp_path, library_tokenizer, {"model_type": "mistral3", "image_token_id": 1})


def test_an_object_in_the_processors_file_goes_before_the_file_of_image_processors(
    library_tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    config = {"model_type": "qwen2_5_vl", "image_token_id": library_tokenizer.token_to_id("<|image_pad|>")}
    rows = {}
    for inner in (None, {}, {"size": {"shortest_edge": 3136, "longest_edge": 6272}}):
        files = {"preprocessor_config": {"max_pixels": 12544}, "processor_config": {"image_processor": inner}}
        tokens = load(tmp_path, library_tokenizer, config, **files)
        rows[str(inner)] = len(placed(tokens, library_tokenizer, "<|image_pad|>", [(280, 280)]))
    assert list(rows.values()) == [16, 100, 4]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (
            "llava",
            {
                "processor_config": {"patch_size": 14, "num_additional_image_tokens": None},
                "preprocessor_config": {"crop_size": {"height": 56, "width": 56}},
            },
        ),
        ("idefics3", {"preprocessor_config": {"size": [56, 56]}}),
    ],
)
def test_files_with_values_of_other_types_are_unusable(
    library_tokenizer: tokenizers.Tokenizer, tmp_path: Path, name: str, files: dict[str, Any]
) -> None:
    with pytest.raises(UNUSABLE):
        load(tmp_path, library_tokenizer, {"model_type": name, "image_token_id": 1, **CLIP}, **files)
