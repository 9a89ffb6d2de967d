"""What was settled when the compiled engines of a folder were built, and whether they can run here.

`trtllm-build` (TensorRT-LLM ≤ 1.2) writes config.json and a rank{N}.engine for each GPU. Two readers want that config.json:
`EngineConfig.from_json_str` in tensorrt_llm/builder.py, and `parseJson` in cpp/tensorrt_llm/runtime/gptJsonConfig.cpp, which
runs in the worker process, says little, and takes a missing limit for zero. So every value is asked for here as the stricter
of the two would have it, before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engine import EngineError

DTYPES = ("float16", "bfloat16", "float32")
"""What `parseJson` takes for pretrained_config.dtype."""
LAST_WITH_ENGINES = (1, 2)
"""Last release that runs compiled engines (docs/source/legacy/tensorrt-backend-removal.md of NVIDIA/TensorRT-LLM)."""
REBUILD = "build the engines again with trtllm-build"

_MAX_COUNT = 2**31 - 1
"""Counts are 32 bits wide in the C++ runtime."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)[-+.!\w]{0,64}", re.ASCII)


class JsonObject:
    """A JSON object in a file; its getters check types and say which file and key is at fault. Null reads as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any], *, within: str = "", advice: str = "") -> None:
        self.path = path
        self._values = values
        self._within = within
        self._advice = advice

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """The object that `path` holds. Raises EngineError; where there is no such file, what `open` raises then."""
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        try:
            values = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            problem = f"no JSON ({error})" if data.strip() else "empty"
            raise EngineError(f"{path} is {problem}: copy or download the folder again") from None
        if not isinstance(values, dict):
            raise EngineError(f"{path} does not hold a JSON object: copy or download the folder again")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def error(self, problem: str) -> EngineError:
        """What is wrong with the file, and what to do about it."""
        return EngineError(f"{self.path}: {problem}{self._advice}")

    def advising(self, advice: str) -> JsonObject:
        """The same object; what is wrong with it ends in `advice`."""
        return JsonObject(self.path, self._values, within=self._within, advice=f"; {advice}")

    def get(self, key: str) -> Any:  # noqa: ANN401 – JSON
        """The value at `key`; None where it is missing or null."""
        return self._values.get(key)

    def inner(self, key: str) -> JsonObject:
        """The object at `key`."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self._ill_typed(key, "an object")
        return JsonObject(self.path, value, within=f"{self._within}{key}.", advice=self._advice)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least one."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
            raise self._ill_typed(key, f"a whole number from 1 to {_MAX_COUNT}")
        return value

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self._ill_typed(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self._ill_typed(key, "a name")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or nothing."""
        return self.text(key) if key in self else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= _MAX_COUNT for one in ids):
            raise self._ill_typed(key, "a token id or a list of them")
        return tuple(ids)

    def _ill_typed(self, key: str, wanted: str) -> EngineError:
        value, name = self.get(key), f"{self._within}{key}"
        return self.error(f"{name} is missing" if value is None else f"{name} is {shortened(value)}, not {wanted}")


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """What was settled when the engines were built; names as in config.json, lengths and budgets in tokens."""

    version: str
    """Of the TensorRT-LLM that built them."""
    architecture: str
    dtype: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    vocab_size: int
    world_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    max_input_len: int
    """Of no effect where padding is removed and attention is fused, which is the default (`_init_max_seq_len` in builder.py)."""
    max_seq_len: int
    """Prompt and new tokens."""
    max_batch_size: int
    max_beam_width: int
    max_num_tokens: int
    """Of one iteration, all sequences together."""
    kv_cache_type: str
    """PAGED, CONTINUOUS or DISABLED."""
    tokens_per_block: int
    remove_input_padding: bool
    paged_context_fmha: bool
    """Whether prompts may be cut into chunks, and computed blocks be used again."""
    gather_context_logits: bool
    """Without it there are no log-probabilities of the prompt."""
    gather_generation_logits: bool
    """Without it there are none of the new tokens."""
    eos_token_ids: tuple[int, ...]
    """Of generation_config.json beside the engines, else of config.json; empty if neither names one."""


def read_engine(config: JsonObject) -> CompiledEngine:
    """What `config`, the config.json of a folder of compiled engines, says of them. Raises EngineError."""
    version = config.advising(REBUILD).text("version")
    if release(version) is None:
        raise config.advising(REBUILD).error(f"version is {shortened(version)}, none of TensorRT-LLM's")
    config = config.advising(f"{REBUILD} (these are of TensorRT-LLM {version})")
    pretrained, build = config.inner("pretrained_config"), config.inner("build_config")
    mapping, quantization = pretrained.inner("mapping"), pretrained.inner("quantization")
    plugins = build.inner("plugin_config")
    if (dtype := pretrained.text("dtype")) not in DTYPES:
        raise pretrained.error(f"pretrained_config.dtype is {shortened(dtype)}, not one of {', '.join(DTYPES)}")
    engine = CompiledEngine(
        version=version,
        architecture=pretrained.text("architecture"),
        dtype=dtype,
        quant_algo=quantization.optional_text("quant_algo"),
        kv_cache_quant_algo=quantization.optional_text("kv_cache_quant_algo"),
        vocab_size=pretrained.count("vocab_size"),
        world_size=mapping.count("world_size"),
        tp_size=mapping.count("tp_size"),
        pp_size=mapping.count("pp_size", 1),
        cp_size=mapping.count("cp_size", 1),
        max_input_len=build.count("max_input_len"),
        max_seq_len=build.count("max_seq_len"),
        max_batch_size=build.count("max_batch_size"),
        max_beam_width=build.count("max_beam_width"),
        max_num_tokens=build.count("max_num_tokens"),
        kv_cache_type=_kv_cache_type(build, plugins),
        tokens_per_block=plugins.count("tokens_per_block"),
        remove_input_padding=plugins.flag("remove_input_padding"),
        paged_context_fmha=plugins.flag("use_paged_context_fmha"),
        gather_context_logits=build.flag("gather_context_logits", default=False),
        gather_generation_logits=build.flag("gather_generation_logits", default=False),
        eos_token_ids=_eos_token_ids(config.path.parent, pretrained),
    )
    if problem := _contradiction(engine):
        raise config.error(problem)
    return engine


def check_engine(path: Path, engine: CompiledEngine, *, world_size: int, installed: str | None) -> None:
    """Whether the `installed` TensorRT-LLM can run the engines in `path` on `world_size` GPUs. Raises EngineError."""
    here, built = release(installed), release(engine.version)
    if here is not None and here > LAST_WITH_ENGINES:
        raise EngineError(
            f"{path} holds compiled engines, which TensorRT-LLM {installed} does not run any more: install tensorrt-llm "
            f"<= 1.2 (they are of {engine.version}), or serve the Hugging Face checkpoint itself"
        )
    if here is not None and built is not None and here != built:
        raise EngineError(
            f"{path} was built by TensorRT-LLM {engine.version}, and {installed} is installed, which cannot run it: "
            f"{REBUILD} of {installed}, or install tensorrt-llm {engine.version}"
        )
    if engine.world_size != world_size:
        raise EngineError(
            f"{path} was built for {count_of_gpus(engine.world_size)}, this replica has {world_size}: start with "
            f"--num-shard {engine.world_size}, or build the engines again for {world_size}"
        )
    _check_files(path, engine.world_size)
    if problem := _unserved(engine):
        raise EngineError(f"{path}: {problem}")


def release(version: object) -> tuple[int, int] | None:
    """Major and minor number of a version; None if it is none."""
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def count_of_gpus(count: int) -> str:
    """In words."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _kv_cache_type(build: JsonObject, plugins: JsonObject) -> str:
    """As `parseBuilderConfig` and `parsePluginConfig` settle it: either case, and paged_kv_cache has the last word."""
    kind = build.text("kv_cache_type").upper()
    if kind not in ("PAGED", "CONTINUOUS", "DISABLED"):
        raise build.error(f"build_config.kv_cache_type is {shortened(kind)}, not PAGED")
    return "PAGED" if plugins.flag("paged_kv_cache") else kind


def _eos_token_ids(folder: Path, pretrained: JsonObject) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    try:
        named = JsonObject.read(path).token_ids("eos_token_id")
    except FileNotFoundError:
        named = ()
    return named or pretrained.token_ids("eos_token_id")


def _contradiction(engine: CompiledEngine) -> str | None:
    """Numbers that no builder writes together; None if there are none such."""
    tp, pp, cp = engine.tp_size, engine.pp_size, engine.cp_size
    if engine.world_size != tp * pp * cp:
        return f"world_size is {engine.world_size}, but tp_size × pp_size × cp_size is {tp} × {pp} × {cp}"
    # The builder cuts max_input_len down to max_seq_len and max_num_tokens to what all sequences together can hold, but
    # never below a block (`_init_max_seq_len` in builder.py, `check_max_num_tokens` in _utils.py): equal is fine.
    if engine.max_input_len > engine.max_seq_len:
        return f"max_input_len {engine.max_input_len} is above max_seq_len {engine.max_seq_len}"
    most = max(engine.max_seq_len * engine.max_batch_size, engine.tokens_per_block)
    if engine.max_num_tokens > most:
        return f"max_num_tokens {engine.max_num_tokens} is more than max_batch_size × max_seq_len, {most}"
    if engine.paged_context_fmha and engine.max_num_tokens < engine.tokens_per_block:
        return f"max_num_tokens {engine.max_num_tokens} is less than a KV block holds, {engine.tokens_per_block}"
    return None


def _check_files(path: Path, world_size: int) -> None:
    """An engine for each rank, and something in it."""
    for rank in range(world_size):
        name = f"rank{rank}.engine"
        try:
            size = (path / name).stat().st_size if (path / name).is_file() else None
        except OSError as error:
            raise EngineError(f"{path / name} cannot be read: {error.strerror or error}") from None
        if not size:
            problem = "is missing" if size is None else "is empty"
            raise EngineError(
                f"{path}: {name} {problem}, one of the engines for {count_of_gpus(world_size)}: copy the whole folder "
                f"again, or {REBUILD}"
            )


def _unserved(engine: CompiledEngine) -> str | None:
    """What batching in flight, one sequence a request, asks of a build; None if it is all there.

    `ModelConfig::supportsInflightBatching` in cpp/include/tensorrt_llm/runtime/modelConfig.h; beams cost the engine its
    prefix cache, and there is nobody here who would ask for them.
    """
    if engine.kv_cache_type != "PAGED":
        return f"its KV cache is {engine.kv_cache_type}, not paged; {REBUILD} --kv_cache_type paged"
    if not engine.remove_input_padding:
        return f"it was built with padded input; {REBUILD} --remove_input_padding enable"
    if engine.max_beam_width != 1:
        return f"it was built for beams of {engine.max_beam_width}, and a request is one sequence here; {REBUILD} --max_beam_width 1"
    return None
