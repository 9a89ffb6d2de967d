"""Requests with pictures, over HTTP, compared with texts of the same length, on a model of the shape of Qwen3-VL-8B with random weights.

python -m text_generation_bench.images --model FOLDER [--streams 32] [--rounds 2] [--side 1000] [--new 128] [--layers 36] [--url URL]

FOLDER has the tokenizer to use, whose placeholders of images are added. With --url, a server that is running is measured, and FOLDER is
not read. Each request of the first level has a new picture; the second turn has the same one, with the answer and another question.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from text_generation_bench.gpu_server import launched
from text_generation_bench.load.prompts import COMMON_WORDS

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}[assistant]"
)
PIXELS_OF_A_TOKEN = 32 * 32
Chat = list[dict[str, Any]]


@dataclass
class Measured:
    """Times and tokens of some requests."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first event of each request."""
    gaps: list[float] = field(default_factory=list)


def write_model(tokenizer: Path, folder: Path, layers: int) -> Path:
    """Write a model folder without weights."""
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    start, end, image, video = (words.token_to_id(mark) for mark in MARKS)
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": -(-words.get_vocab_size() // 256) * 256,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "max_position_embeddings": 32768,
        "rope_parameters": rope,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    sizes = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "size": sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def picture(seed: int, side: int) -> str:
    """Return the data URI of a smooth picture."""
    colors = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).resize((side, side)).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def with_picture(seed: int, side: int) -> Chat:
    parts = [
        {"type": "image_url", "image_url": {"url": picture(seed, side)}},
        {"type": "text", "text": "What is this?"},
    ]
    return [{"role": "user", "content": parts}]


def with_text(seed: int, words: int) -> Chat:
    drawn = random.Random(seed).choices(COMMON_WORDS.split(), k=words)
    return [{"role": "user", "content": " ".join(drawn)}]


async def ask(session: aiohttp.ClientSession, url: str, chat: Chat, new_tokens: int, level: Measured) -> str:
    """Return the answer to a chat."""
    body = {"model": "tgi", "messages": chat, "max_tokens": new_tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    started = last = time.perf_counter()
    answer = ""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if usage := event.get("usage"):
                level.tokens += usage["completion_tokens"]
                level.prompt_tokens += usage["prompt_tokens"]
                level.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if choices := event.get("choices"):
                (level.gaps if last > started else level.first).append(now - last)
                last = now
                answer += choices[0]["delta"].get("content") or ""
    return answer


async def run_level(
    session: aiohttp.ClientSession, options: argparse.Namespace, name: str, streams: Sequence[Sequence[Chat]]
) -> list[list[str]]:
    """Ask the chats of each stream one after the other, print a line, and return the answers."""
    level, started = Measured(), time.perf_counter()

    async def stream(chats: Sequence[Chat]) -> list[str]:
        return [await ask(session, options.url, chat, options.new, level) for chat in chats]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(chats)) for chats in streams]
    answers = [task.result() for task in tasks]
    seconds, requests = time.perf_counter() - started, len(level.first)
    first, gaps = sorted(level.first), sorted(level.gaps)
    print(
        f"{name:22} {requests:5} requests {level.tokens / seconds:8.0f} tokens/s, first event p50 "
        f"{first[requests // 2] * 1e3:7.1f} ms, max {first[-1] * 1e3:7.1f}; between p50 {gaps[len(gaps) // 2] * 1e3:6.2f} ms; "
        f"{level.prompt_tokens / requests:.0f} prompt tokens, {level.cached_tokens / requests:.0f} cached",
        flush=True,
    )
    return answers


async def measure(options: argparse.Namespace) -> None:
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        first = random.randrange(3, 1 << 62)  # no server has seen the pictures of an earlier run
        seeds = [range(first + at * options.rounds, first + (at + 1) * options.rounds) for at in range(options.streams)]
        await run_level(
            session, options, "one stream, pictures", [[with_picture(first - 1 - at, options.side) for at in range(3)]]
        )
        chats = [[with_picture(seed, options.side) for seed in some] for some in seeds]
        answers = await run_level(session, options, "pictures", chats)
        question = {"role": "user", "content": "And now?"}
        turns = [
            [
                [*chat, {"role": "assistant", "content": answer}, question]
                for chat, answer in zip(some, own, strict=True)
            ]
            for some, own in zip(chats, answers, strict=True)
        ]
        await run_level(session, options, "second turn", turns)
        words = options.side**2 // PIXELS_OF_A_TOKEN
        await run_level(session, options, "texts", [[with_text(seed, words) for seed in some] for some in seeds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", type=int, default=1000, help="pixels")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    options = parser.parse_args()
    if (options.model is None) == (options.url is None):
        parser.error("either --model or --url")
    with ExitStack() as stack:
        if options.url is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-images-")))
            folder = write_model(options.model, scratch / "model", options.layers)
            arguments = ["--load-format", "dummy", "--speculate", "0"]
            options.url = stack.enter_context(launched(folder, arguments, scratch / "log")).url
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
