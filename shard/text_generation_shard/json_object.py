"""A JSON object of a model folder, such as config.json: read within limits, its values checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Self, TypeGuard

from text_generation_common.model_files import MAX_CONFIG_BYTES, MAX_TOKEN_IDS, ModelFileError, find_file, read_file
from text_generation_shard.engine import EngineError

MAX_COUNT = 2**31 - 1
"""Limit of a count without one of its own: counts are 32-bit integers in TensorRT-LLM's C++ runtime."""
_COUNTS = {
    1 << 6: "conv_L_cache conv_kernel mamba_d_conv mamba_expand linear_conv_kernel_dim n_shared_experts",
    1 << 8: "n_group topk_group",
    1 << 10: "num_hidden_layers num_dense_layers first_k_dense_replace",
    1 << 12: """
        num_attention_heads num_key_value_heads head_dim global_head_dim num_global_key_value_heads num_experts
        num_local_experts n_groups mamba_num_heads mamba_head_dim ssm_state_size mamba_n_groups mamba_n_heads
        mamba_d_head mamba_d_state linear_num_key_heads linear_num_value_heads linear_key_head_dim
        linear_value_head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim n_routed_experts
    """,
    1 << 14: "q_lora_rank",
    1 << 16: "block_multiple_of",
    1 << 17: "hidden_size dim_model_base",
    1 << 20: """
        intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        block_ff_dim mamba_d_ssm
    """,
    1 << 24: "max_position_embeddings",
    MAX_TOKEN_IDS: "vocab_size",
}
"""Names by their limit."""
MAX_COUNTS: Mapping[str, int] = {name: limit for limit, names in _COUNTS.items() for name in names.split()}
"""Limits of the sizes of a model, each at least four times that of the largest model known (positions: 1.6 times). A separate
check compares the weights that all sizes describe with the memory."""
MAX_NUMBER = 1e12
"""Limit of a number that is not a size."""
_RANGES = {
    (1e-12, 0.1): "rms_norm_eps layer_norm_epsilon norm_eps",
    (1e-6, 1e6): """
        attention_multiplier embedding_multiplier residual_multiplier logits_scaling scale_emb scale_depth
        routed_scaling_factor lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
        mlp_multipliers ssm_in_multiplier ssm_out_multiplier ssm_multipliers lora_alpha
    """,
    (1e-12, 1e6): "time_step_min",
    (0.01, 100): "block_ffn_dim_multiplier swiglu_alpha attention_factor mscale mscale_all_dim",
    (1, 1e6): "query_pre_attn_scalar factor",
    (0.01, 1e6): """
        attn_logit_softcapping final_logit_softcapping swiglu_limit low_freq_factor high_freq_factor beta_fast
        beta_slow short_factor long_factor
    """,
    (2, MAX_NUMBER): "rope_theta rope_local_base_freq",
    (0.01, 1): "partial_rotary_factor",
    (1e-6, 100): "llama_4_scaling_beta",
}
"""Names by their range."""
NUMBERS: Mapping[str, tuple[float, float]] = {
    name: limits for limits, names in _RANGES.items() for name in names.split()
}
"""Range of the numbers of a model that are not sizes, or of each number in a list: far wider than in the models known. Outside
of it the results are NaN, or the same at every position."""
MAX_END_TOKENS = 256
"""Limit of the EOS tokens of a model: they are sent with every sequence."""
SHARED_WITH_TEXT = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Keys of a config of text and images that hold for its text part as well."""


class UnsupportedError(EngineError):
    """A value that is not wrong, but that the native models do not compute."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object in a file. Getters check types and raise EngineError with file and key. Null counts as missing, but for flags."""

    path: Path
    values: Mapping[str, Any]
    within: str = ""
    advice: str = ""

    @classmethod
    def read(cls, folder: Path, name: str = "config.json") -> Self:
        """Read the object in a file. Raises EngineError, or FileNotFoundError or NotADirectoryError if there is no file."""
        try:
            path = find_file(folder, name)
            data = read_file(path, MAX_CONFIG_BYTES)
        except ModelFileError as error:
            raise EngineError(str(error)) from None
        try:
            values = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            problem = f"no JSON ({error})" if data.strip() else "empty"
            raise EngineError(f"{path} is {problem}: copy or download the folder again") from None
        if not isinstance(values, dict):
            raise EngineError(f"{path} does not hold a JSON object: copy or download the folder again")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, problem: str) -> EngineError:
        """Return an error with the path, the problem and the advice."""
        return EngineError(f"{self.path}: {problem}{self.advice}")

    def unsupported(self, problem: str) -> UnsupportedError:
        """Return the error of a value that another implementation of the model may know."""
        return UnsupportedError(str(self.error(problem)))

    def advising(self, advice: str) -> Self:
        """Return the same object, with `advice` appended to its errors."""
        return replace(self, advice=f"; {advice}")

    def merged(self, values: Mapping[str, Any]) -> Self:
        return replace(self, values={**self.values, **values})

    def get(self, key: str) -> Any:  # noqa: ANN401 – JSON
        """Return the value at `key`; None if it is missing or null."""
        return self.values.get(key)

    def inner(self, key: str) -> Self:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self._type_error(key, "an object")
        return replace(self, values=value, within=f"{self.within}{key}.")

    def decoder(self) -> Self:
        """Return the part of a config.json that describes the decoder: all of it, or `text_config` of a model of text and images."""
        if "text_config" not in self:
            return self
        text = self.inner("text_config")
        return text.merged({key: self.get(key) for key in SHARED_WITH_TEXT if key in self and key not in text})

    def count(self, key: str, default: int | None = None) -> int:
        """Return the whole number at `key`, from 1 to its limit."""
        value = self.get(key)
        value = default if value is None else value
        most = MAX_COUNTS.get(key, MAX_COUNT)
        if not is_count(value) or value > most:
            raise self._type_error(key, f"a whole number from 1 to {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number at `key`, in its range."""
        value, (least, most) = self.get(key), NUMBERS[key]
        if value is None and default is not None:
            return default
        if not _is_number(value, least, most):
            raise self._type_error(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def numbers(self, key: str, longest: int) -> tuple[float, ...]:
        """Return the list of numbers at `key`, each in the range of `key`; it has one number at least."""
        values, (least, most) = self.get(key), NUMBERS[key]
        valid = isinstance(values, list) and 0 < len(values) <= longest
        if not valid or not all(_is_number(value, least, most) for value in values):
            raise self._type_error(key, f"a list of 1 to {longest} numbers from {least:g} to {most:g}")
        return tuple(map(float, values))

    def is_null(self, key: str) -> bool:
        return key in self.values and self.values[key] is None

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return the flag at `key`. Null is false, as in the classes of transformers."""
        value = False if self.is_null(key) else self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._type_error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """Return the string at `key`, which must not be empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self._type_error(key, "a name")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return the string at `key`; None if it is missing."""
        return self.text(key) if key in self else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token id or the list of token ids at `key`; empty if it is missing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_COUNT for i in ids)
        if not valid or len(ids) > MAX_END_TOKENS:
            raise self._type_error(key, f"a token id or a list of at most {MAX_END_TOKENS}")
        return tuple(ids)

    def _type_error(self, key: str, wanted: str, value: object = None) -> EngineError:
        value, name = self.get(key) if value is None else value, f"{self.within}{key}"
        return self.error(f"{name} is missing" if value is None else f"{name} is {shortened(value)}, not {wanted}")


def eos_token_ids(folder: Path, config: JsonObject) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, else of config.json: an id, a list, or none."""
    try:
        generation = JsonObject.read(folder, "generation_config.json")
    except FileNotFoundError:
        generation = config
    return generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")


def is_count(value: object) -> TypeGuard[int]:
    """Return True for a whole number from 1 to MAX_COUNT."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
