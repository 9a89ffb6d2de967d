"""Convert a GGUF file to a folder that can be served: the program behind `text-generation-launcher convert`.

The library reads the file, dequantizes its weights, and finds the tokenizer and the chat template in it.
"""

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text_generation_common.command_line import print_to_end
from text_generation_common.exit_codes import ExitCode
from text_generation_common.one_line import one_line

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

COMMAND = "text-generation-launcher convert"
MAGIC = b"GGUF"
SCALING = ".rope.scaling."
"""Between the architecture and the name of a value of a scaled rotation."""
GEMMA_27B = (("gemma2", 46), ("gemma3_text", 62))
"""Types and layers."""
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotation of Llama 3.1 and later; the file has the factors that result."""
PACKAGES = ("torch", "transformers", "accelerate", "gguf")


class ConvertError(Exception):
    """A file cannot be converted. The message is one line."""


def convert_to_new_folder(gguf: Path, folder: Path) -> None:
    """Convert to a folder that does not exist or is empty; it has all files or none. Raises ConvertError."""
    try:
        with gguf.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConvertError(f"{gguf} is not a GGUF file")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConvertError(f"{folder} is not empty" if folder.is_dir() else f"{folder} is not a folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as scratch:
            converted = Path(scratch, "converted")
            converted.mkdir()
            convert(gguf, converted)
            converted.rename(folder)
    except OSError as error:
        raise ConvertError(f"{error.filename or folder}: {error.strerror or one_line(error)}") from None


def convert(gguf: Path, folder: Path, chat_template: str = "") -> None:
    """Write a GGUF file as safetensors in bfloat16 and tokenizer.json; `chat_template` is for a file that has none."""
    os.environ["TQDM_DISABLE"] = "1"  # progress bars do not end in line breaks; transformers has two kinds
    try:
        for package in PACKAGES:
            import_module(package)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:  # one is not installed, or too old
        raise ConvertError(f"{one_line(error)}: pip install --upgrade {' '.join(PACKAGES)}") from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with warnings.catch_warnings(action="ignore"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            model, info = loaded
            if missing := sorted(info["missing_keys"]):  # a part of several, or the images' part of a model
                raise ConvertError(f"it has no tensor {missing[0]}")
            for name, stored, expected in info["mismatched_keys"]:
                raise ConvertError(f"{name} has shape {list(stored)}, the library expects {list(expected)}")
            complete(model, import_module("gguf").GGUFReader(gguf))
            model.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            tokenizer.chat_template = tokenizer.chat_template or chat_template or None
            tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # weights are written for their owner only, and a service may run as another user
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 – the library raises errors of many kinds
        raise ConvertError(f"{gguf} cannot be converted: {one_line(error)}") from None


def complete(model: "PreTrainedModel", reader: "GGUFReader") -> None:
    """Add to a model's config what the library does not read of its file. Raises ConvertError for what remains unread."""
    config: Any = model.config
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    bias = next((name for name in tensors if name.endswith(".bias")), None)
    if bias is not None and not any(name.endswith("bias") for name in model.state_dict()):
        raise ConvertError(f"the library does not read tensor {bias}")
    if (config.model_type, config.num_hidden_layers) in GEMMA_27B:  # the file does not tell, llama.cpp knows it
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    if rope.get("rope_type") != "default":
        return
    scaling = {key.partition(SCALING)[2]: field.contents() for key, field in reader.fields.items() if SCALING in key}
    if (factors := tensors.get("rope_freqs.weight")) is not None:
        rope |= LLAMA3 | {"factor": float(factors.data.max())}
        scaled, _ = import_module("transformers").ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        count = len(factors.data)
        if not all(
            abs(factor * float(scaled[place]) * rope["rope_theta"] ** (place / count) - 1) < 1e-3
            for place, factor in enumerate(factors.data.tolist())
        ):
            raise ConvertError("its rotation has other factors than that of Llama 3")
    elif (kind := scaling.get("type", "none")) in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": scaling.get("factor", 1.0)}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = scaling.get(
                "original_context_length", config.max_position_embeddings
            )
    elif kind != "none" or "rope_factors_long.weight" in tensors:
        raise ConvertError("the library does not read the factors of its rotation")


def main(arguments: Sequence[str]) -> ExitCode:
    if len(arguments) != 2 or any(argument.startswith("-") for argument in arguments):
        sys.stderr.write(f"usage: {COMMAND} FILE.gguf FOLDER\n")
        return ExitCode.STOPPED if {"-h", "--help"}.intersection(arguments) else ExitCode.USAGE
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        convert_to_new_folder(Path(arguments[0]).absolute(), Path(arguments[1]).absolute())
    except (ConvertError, KeyboardInterrupt) as error:
        sys.stderr.write(f"{COMMAND}: {str(error) or 'interrupted'}\n")
        return ExitCode.FAILED
    print_to_end(f"{arguments[1]} is ready: text-generation-launcher --model-id {arguments[1]}\n")
    return ExitCode.STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
