"""Pictures from HTTP to the logits: the router's tokens and the torch engine give what transformers gives for the same files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from full_grid import full
from http_stack import LIMITS, serve
from pictures import data_uri
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vision_models import VisionModel, picture, vision_configs

from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine

FAST = ("mistral3", "qwen3_vl", "smolvlm")
"""Rows, squares and tiles."""
NEW_TOKENS = 5
AROUND = ("<start_of_image>", "<end_of_image>", "<|begin_of_image|>", "<|end_of_image|>", "<|image>", "<image|>")
MARKS = (*AROUND, "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<img>", "</img>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
TOKENS = {
    "mistral3": "[IMG]",
    "llava, pixtral": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<image_soft_token>",
    "gemma4": "<|image|>",
}


def write_tokenizer(folder: Path, image: str) -> None:
    """Write a tokenizer with the ids of `vision_models`, a token for each byte, and the marks of layouts."""
    special = ["<0>", "<1>", "<2>", image, "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKS, *TILES, "ĊĊ"]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special, *MARKS, *TILES])
    tokenizer.save(str(folder / "tokenizer.json"))


def expected(vision: VisionModel, ids: Sequence[int], files: Sequence[bytes]) -> list[int]:
    """The most probable tokens after a prompt, by transformers."""
    known, inputs = list(ids), vision._inputs(files)
    while len(known) < len(ids) + NEW_TOKENS:
        known.append(int(vision._logits(known, inputs)[-1].argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize("name", [name if name in FAST else full(name) for name in vision_configs()])
async def test_the_answer_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    vision = VisionModel(name, tmp_path)
    image = TOKENS.get(name, {"qwen": "<|image_pad|>", "glm4": "<|image|>"}.get(name[:4], "<image>"))
    write_tokenizer(tmp_path, image)
    engine = build_engine(ShardConfig(model_path=str(tmp_path), device="cpu", max_batch_size=4))
    files = [picture(70, 45, 0), picture(31, 90, 1)][: engine.info.max_images]
    limits = replace(LIMITS, max_images=engine.info.max_images, max_input_tokens=400, max_total_tokens=500)
    small = {"max_batch_prefill_tokens": 24}  # chunks end inside pictures
    options = {"pool_tokens": 2048, "build": lambda _: engine, "linked": True, "policy": small}
    async with serve(tmp_path, limits=limits, **options) as stack:
        turn = "".join(f"![]({data_uri(file)})ab" for file in files)
        for text in (turn + "what", turn + "what and more"):
            asked = {"max_new_tokens": NEW_TOKENS, "details": True}
            scored = await stack.generate(text, decoder_input_details=True, **asked)  # its prompt is computed
            ids = [token["id"] for token in scored["details"]["prefill"]]
            hits = stack.scheduler.stats().hit_tokens
            answers = [scored, await stack.generate(text, **asked), await stack.generate(text, **asked)]
            for answer in answers:
                assert [token["id"] for token in answer["details"]["tokens"]] == expected(vision, ids, files)
            assert stack.scheduler.stats().hit_tokens - hits >= (len(ids) - 1) // 16 * 16
