"""Pictures for tests, and the folder of a model that takes some."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PATCH = 28
"""Side of the square of a picture that is a token."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[answer]"
)


def picture(width: int, height: int, color: str = "red", kind: str = "PNG", **options: Any) -> bytes:  # noqa: ANN401
    """Return the file of a picture of one color."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind, **options)
    return file.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def tokens_of(width: int, height: int) -> int:
    """The tokens of a picture in the prompts of the model: rows, and a mark after each."""
    return (-(-width // PATCH) + 1) * -(-height // PATCH)


def image_model(folder: Path) -> Path:
    """Write the files of a Mistral 3 that the router reads, with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "config": {
            "model_type": "mistral3",
            "image_token_index": tokenizer.token_to_id("[IMG]"),
            "spatial_merge_size": 2,
            "vision_config": {"patch_size": PATCH // 2},
        },
        "preprocessor_config": {"size": {"longest_edge": 1540}},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
