"""A checkpoint whose config.json has one odd value is refused in one line, at once, or computed as transformers computes it."""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_driver import Driver
from full_grid import full
from model_families import FAMILIES, tiny_config
from model_families import random_model as random_library_model
from native_families import native_configs
from tiny_transformers import SHAPE, random_model, save

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.device.memory import peak_memory, reset_peak

NATIVE = native_configs(
    SHAPE | {"max_position_embeddings": 256, "tie_word_embeddings": False}, head_dim=16, wide_head_dim=24
)
BY_TRANSFORMERS = ("deepseek_v3", "qwen3_5_text")
NUM_CASES = 240
"""Cases tried of about 900 for each model."""
ODD: tuple[Any, ...] = (
    *(True, False, -1, 0, 1, 3, 30_000, 2**31, 10**18, 1e-9, 1.0000000001, -0.5, 1e9, math.nan, math.inf),
    *("", "x", "x" * 5000, None, [], [1, "a"], [[[0] * 3] * 3], {}, {"a": {"b": 1}}),
)
PROMPT = torch.randint(0, 120, (60,), generator=torch.Generator().manual_seed(1)).tolist()
MOST_SECONDS = 10.0
MOST_BYTES = 300 << 20
Path_ = tuple[str | int, ...]


def places(values: dict[str, Any], at: Path_ = ()) -> Iterator[Path_]:
    """Yield the place of every value, in objects inside too, and of the first item of every list."""
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))
        elif isinstance(value, list) and value:
            yield (*at, key, 0)


def changed(values: dict[str, Any], place: Path_, value: object) -> dict[str, Any]:
    values = copy.deepcopy(values)
    inner: Any = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return values


def served(folder: Path, model_impl: str) -> torch.Tensor | None:
    """Return the prompt's logprobs; None if the model is refused, or too short for the prompt. Fails if either takes much."""
    reset_peak()
    before, started = peak_memory(), time.process_time()
    config = ShardConfig(engine="torch", model_path=str(folder), device="cpu", max_batch_size=4, model_impl=model_impl)  # type: ignore[arg-type]
    result = None
    try:
        engine = build_engine(config)
        driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))
        if engine.info.max_sequence_length > len(PROMPT):
            stream = driver.admit(PROMPT, 1, prompt_logprobs=True)
            driver.run()
            assert stream.failure is None
            result = torch.tensor(stream.prompt_logprobs[0][1:])
            assert result.isfinite().all()
    except EngineError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 900
    assert time.process_time() - started < MOST_SECONDS
    assert peak_memory() - before < MOST_BYTES
    return result


def reference(folder: Path) -> torch.Tensor | None:
    """Return what transformers computes; None if it refuses the config, or lacks tensors."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        with torch.inference_mode():
            logprobs = model.eval()(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    except Exception:  # noqa: BLE001 – it checks values in many ways
        return None
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    return logprobs[:-1].gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)


def is_known(place: Path_, value: object) -> bool:
    """Return True for a difference that is meant: longrope has the factors of the longest sequence, as in vLLM."""
    return place == ("max_position_embeddings",) and value == 30_000


def written(folder: Path, name: str) -> dict[str, Any]:
    """Write a random model; return its config."""
    save(random_model(NATIVE[name]), folder)
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("lfm2", {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}),
        ("granitemoehybrid", {"layers_block_type": "layer_types"}),
        (
            "nemotron_h",
            {
                "mamba_n_groups": "n_groups",
                "mamba_d_conv": "conv_kernel",
                "mamba_dt_min": "time_step_min",
                "mamba_conv_bias": "use_conv_bias",
                "layer_types": "layers_block_type",
            },
        ),
    ],
)
def test_older_names_of_fields_go_before_the_usual_ones(tmp_path: Path, name: str, older: dict[str, str]) -> None:
    values = written(tmp_path, name)
    usual = served(tmp_path, "native")
    assert usual is not None
    for old, new in older.items():
        value = values[old] = values.pop(new)
        if not isinstance(value, list):
            values[new] = not value if isinstance(value, bool) else 3 * value
    (tmp_path / "config.json").write_text(json.dumps(values))
    found, expected = served(tmp_path, "native"), reference(tmp_path)
    assert found is not None
    assert torch.equal(found, usual)
    assert expected is not None
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("name", "key", "meant"),
    [
        ("granitemoehybrid", "attention_multiplier", 8**-0.5),
        ("granitemoehybrid", "mamba_conv_bias", False),
        ("falcon_h1, normed", "mamba_norm_before_gate", False),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "rope_interleave", False),
    ],
)
def test_null_means_what_it_does_in_transformers(tmp_path: Path, name: str, key: str, meant: object) -> None:
    values = written(tmp_path, name)
    results = []
    for value in (None, meant, values[key]):
        (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
        results.append(served(tmp_path, "native"))
    found, expected, usual = results
    assert found is not None
    assert expected is not None
    assert usual is not None
    assert torch.equal(found, expected)
    assert not torch.equal(found, usual)


@pytest.mark.parametrize("name", [full(name) for name in NATIVE])
def test_a_null_is_refused_or_computed_as_transformers_does(tmp_path: Path, name: str) -> None:
    values = written(tmp_path, name)
    wrong = []
    for key in values.keys() - {"text_config"}:  # without it, transformers builds its largest model
        (tmp_path / "config.json").write_text(json.dumps(values | {key: None}))
        result, expected = served(tmp_path, "native"), reference(tmp_path)
        if result is not None and expected is not None and not (result - expected).norm() <= 1e-4 * expected.norm():
            wrong.append(key)
    assert wrong == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        full(name)
        for name in (
            *("llama, yarn rope", "phi3, partial rotation, longrope", "gemma3_text, scaled", "gpt_oss", "ministral3"),
            *BY_TRANSFORMERS,
        )
    ],
)
def test_an_odd_value_is_refused_or_computed_as_transformers_does(tmp_path: Path, name: str) -> None:
    native = name in NATIVE
    model = random_model(NATIVE[name]) if native else random_library_model(tiny_config(name, FAMILIES[name].changes))
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    model_impl = "native" if native else "transformers"
    usual = served(tmp_path, model_impl)
    assert usual is not None
    cases = [(place, value) for place in places(values) for value in ODD]
    wrong = []
    for place, value in random.Random(name).sample(cases, NUM_CASES):
        config.write_text(json.dumps(changed(values, place, value)))
        result = served(tmp_path, model_impl)
        if result is None or torch.equal(result, usual) or is_known(place, value):
            continue
        expected = reference(tmp_path)
        if expected is not None and not (result - expected).norm() <= 1e-4 * expected.norm():
            wrong.append((place, value))
    assert wrong == []
