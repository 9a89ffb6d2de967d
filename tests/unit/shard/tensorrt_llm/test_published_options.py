"""The options that NVIDIA publishes for `trtllm-serve` start this engine, or are refused by name all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from self_driver import SelfDriver
from standin import model_folder, read_log
from trtllm_engines import Engines

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.build import read_model

MTP_1 = {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
MTP_3 = {"decoding_type": "MTP", "max_draft_len": 3}
GRAPHS = {"enable_padding": True, "max_batch_size": 128}
COMMON: dict[str, Any] = {"max_batch_size": 128, "max_num_tokens": 3200, "trust_remote_code": True}

NEUTRAL = {"backend": "pytorch", "max_beam_width": 1, "enable_iter_perf_stats": True}


def split(gpus: int) -> dict[str, Any]:
    return {"tensor_parallel_size": gpus, "moe_expert_parallel_size": gpus, **COMMON}


PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-r1-deepgemm": {
        **split(8),
        "enable_attention_dp": True,
        "cuda_graph_config": GRAPHS,
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.8},
        "stream_interval": 10,
        "speculative_config": MTP_1,
        "moe_config": {"backend": "DEEPGEMM", "max_num_tokens": 3200},
    },
    "deepseek-r1-latency": {
        **split(8),
        "moe_config": {"backend": "TRTLLM"},
        "speculative_config": MTP_3
        | {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6},
    },
    "deepseek-r1-throughput": {
        **split(8),
        "kv_cache_free_gpu_memory_fraction": 0.8,
        "kv_cache_config": {"dtype": "fp8"},
        "speculative_config": MTP_1,
    },
    "deepseek-v4-pro-latency": {
        **split(8),
        "cuda_graph_config": {"batch_sizes": [1, 2, 4, 8], "enable_padding": True},
        "disable_overlap_scheduler": False,
        "enable_lm_head_tp_in_adp": False,
        "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False, "tokens_per_block": 128},
        "max_seq_len": 9256,
        "moe_config": {"backend": "TRTLLM", "use_low_precision_moe_combine": True},
        "num_postprocess_workers": 4,
        "pipeline_parallel_size": 1,
        "print_iter_log": True,
        "speculative_config": MTP_3,
        "stream_interval": 100,
    },
    "gpt-oss-120b-throughput": {
        **split(2),
        "enable_attention_dp": True,
        "moe_config": {"backend": "TRTLLM"},
        "num_postprocess_workers": 4,
        "attention_dp_config": {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1},
    },
    "kimi-k2-thinking": {
        **split(8),
        "enable_attention_dp": True,
        "max_seq_len": 8212,
        "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 8448},
    },
    "llama-3.3-70b": {**split(1), "enable_attention_dp": False, "kv_cache_config": {"dtype": "fp8"}},
    "qwen3": {**split(1), "kv_cache_free_gpu_memory_fraction": 0.8, "print_iter_log": True, **NEUTRAL},
    "qwen3.8-high-throughput-mtp3": {
        **split(4),
        "disable_mm_encoder": True,
        "kv_cache_config": {"use_kv_cache_manager_v2": False, "mamba_ssm_cache_dtype": "bfloat16"},
        "moe_config": {"backend": "DEEPGEMM", "load_balancer": "eplb.yaml"},
        "speculative_config": MTP_3,
    },
}
"""The keys of files in examples/configs/curated of NVIDIA/TensorRT-LLM, with some of their values."""
NEWER = {
    "qwen3.8-high-throughput-mtp3": "the installed TensorRT-LLM has no option 'disable_mm_encoder', the nearest is "
    "mm_encoder_only (the server generates text); kv_cache_config has no field 'use_kv_cache_manager_v2'"
}
"""File → the error of 1.2, which lacks some of its options."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_options_start(built: Engines, version: str, tmp_path: Path, name: str) -> None:
    options = PUBLISHED[name]
    gpus = options["tensor_parallel_size"]
    folder = model_folder(tmp_path / "large", max_position_embeddings=16384)
    given = {"options": json.dumps(options), "num_shard": gpus, "folder": folder, "log": tmp_path / "log"}
    if version == "1.2" and name in NEWER:
        with pytest.raises(EngineError) as refused:
            built(**given)
        assert str(refused.value) == f"--trtllm-options: {NEWER[name]}"
        return
    driver = SelfDriver(built(**given))
    stream = driver.admit((5, 6, 7), 3)
    driver.run()
    assert stream.tokens == [5, 6, 7]
    [started] = read_log(tmp_path / "log").of("start")
    fraction = options.get(
        "kv_cache_free_gpu_memory_fraction", options.get("kv_cache_config", {}).get("free_gpu_memory_fraction", 0.9)
    )
    assert (started["tensor_parallel_size"], started["free_gpu_memory_fraction"]) == (gpus, fraction)
    assert (started["trust_remote_code"], started["num_postprocess_workers"]) == (False, 0)


def test_all_refused_options_are_named_at_once(tmp_path: Path) -> None:
    config = ShardConfig(
        engine="tensorrt-llm",
        model_path=str(model_folder(tmp_path)),
        trtllm_options="{backend: tensorrt, max_beam_width: 2, max_num_tokens: 64, reasoning_parser: deepseek-r1}",
    )
    with pytest.raises(EngineError) as refused:
        read_model(config)
    assert str(refused.value) == (
        "--trtllm-options: backend is not set here: the model folder decides; max_beam_width is not set here: a request is one "
        "sequence; reasoning_parser is not set here: use --split-reasoning"
    )


def test_sizes_that_contradict_num_shard_are_refused(built: Engines) -> None:
    with pytest.raises(EngineError, match=r"tensor_parallel_size 8 does not fit the number of GPUs \(4, --num-shard\)"):
        built(options="tensor_parallel_size: 8\nprint_iter_log: true", num_shard=4)
