"""The stand-in against the recorded signatures of TensorRT-LLM, and the names that the engine uses.

The tables tests/fakes/tensorrt_llm/trtllm_standin/signatures-*.json say where each entry was read. The stand-in builds its classes from
them, except those of results.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from standin import VERSIONS, importable, table

from text_generation_shard.engines.tensorrt_llm import statistics

USED = {
    "LLM.__init__": {"": "model skip_tokenizer_init tensor_parallel_size dtype"},
    "LLM.generate_async": {
        "": "inputs sampling_params streaming cache_salt lora_request trace_headers",
        "1.3": "priority",
    },
    "LLM.get_stats_async": {"": "timeout"},
    "LLM.get_stats": {"": "timeout"},
    "LLM.shutdown": {},
    "LLM._check_health": {},
    "LLM.get_kv_cache_capacity": {},
    "TorchLlmArgs": {
        "": "max_batch_size max_num_tokens max_seq_len enable_chunked_prefill enable_iter_perf_stats load_format "
        "guided_decoding_backend kv_cache_config scheduler_config cuda_graph_config enable_lora lora_config "
        "speculative_config enable_attention_dp return_perf_metrics",
        "1.2": "sampler_type",
        "1.3": "generation_config",
    },
    "BaseLlmArgs": {"1.2": "pipeline_parallel_size context_parallel_size gather_generation_logits"},
    "KvCacheConfig": {"": "free_gpu_memory_fraction tokens_per_block event_buffer_max_size max_attention_window"},
    "SchedulerConfig": {"": "capacity_scheduler_policy"},
    "SamplingParams": {
        "": "end_id pad_id max_tokens min_tokens stop_token_ids include_stop_str_in_output ignore_eos detokenize "
        "temperature top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty "
        "prompt_ignore_length embedding_bias logprobs prompt_logprobs guided_decoding",
        "1.3": "prompt_logprobs_simple_format",
    },
    "GuidedDecodingParams": {"": "json regex grammar structural_tag"},
    "MTPDecodingConfig": {"": "num_nextn_predict_layers mtp_eagle_one_model allow_advanced_sampling"},
    "EagleDecodingConfig": {"": "eagle3_one_model allow_advanced_sampling"},
    "NGramDecodingConfig": {"": "max_draft_len"},
    "DraftTargetDecodingConfig": {"": "max_draft_len speculative_model"},
    "stats": {
        "": "iter numQueuedRequests kvCacheStats freeNumBlocks tokensPerBlock inflightBatchingStats iterLatencyMS "
        "specDecodingStats numRequestsWithDraftTokens numDraftTokens numAcceptedTokens",
        "1.3": "gpuForwardTimeMS prevDeviceStepTimeMS attentionDpRank rank numQueuedContextRequests "
        "kvCacheIterationStats primaryFreeNumBlocks",
    },
    "Logprob": {"": "logprob rank"},
    "RequestOutput": {"": "outputs cached_tokens abort"},
    "CompletionOutput": {"": "token_ids logprobs prompt_logprobs finish_reason stop_reason"},
    "LoraConfig": {
        "": "lora_target_modules trtllm_modules_to_hf_modules max_lora_rank max_loras max_cpu_loras",
    },
    "LoRARequest": {"": "lora_name lora_int_id lora_path"},
    "public imports": {
        "": "tensorrt_llm.LLM tensorrt_llm.SamplingParams tensorrt_llm.llmapi.RequestError "
        "tensorrt_llm.llmapi.TorchLlmArgs tensorrt_llm.llmapi.GuidedDecodingParams tensorrt_llm.llmapi.KvCacheConfig "
        "tensorrt_llm.llmapi.SchedulerConfig tensorrt_llm.llmapi.CudaGraphConfig tensorrt_llm.llmapi.LoRARequest",
        "1.2": "tensorrt_llm._tensorrt_engine.LLM tensorrt_llm.executor.utils.RequestError "
        "tensorrt_llm.llmapi.MTPDecodingConfig tensorrt_llm.llmapi.EagleDecodingConfig "
        "tensorrt_llm.llmapi.NGramDecodingConfig tensorrt_llm.llmapi.DraftTargetDecodingConfig",
    },
}
"""Entry → release ("": both) → the names that the engine uses: keywords, fields, attributes, imports."""
ONLY_IN = {
    "LLM._check_health": "1.2",
    "LLM.get_kv_cache_capacity": "1.3",
    "BaseLlmArgs": "1.2",
}
"""Entries of one release; the engine checks whether they exist."""


@dataclass(frozen=True)
class Release:
    """One release of the stand-in, and its table."""

    version: str
    entries: dict[str, Any]

    def names_in(self, name: str) -> set[str]:
        """The names in an entry: fields, parameters, attributes, methods; of imports their full names."""
        entry = self.entries[name]
        if name == "public imports":
            return {f"{module}.{found}" for module, names in entry.items() for found in names["names"]}
        if name == "stats":
            return {key.partition(" ")[0] for keys in entry.values() if isinstance(keys, list) for key in keys}
        lists = ("attributes", "methods", "properties", "attributes_undocumented_older")
        return {field["name"] for kind in ("fields", "parameters") for field in entry.get(kind, ())} | {
            found for kind in lists for found in entry.get(kind, ())
        }


@pytest.fixture(scope="module", params=VERSIONS)
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    with pytest.MonkeyPatch.context() as patch, importable(request.param, patch):
        yield Release(request.param, table(request.param)["entries"])


@pytest.mark.parametrize("name", ["CompletionOutput", "Logprob", "RequestOutput"])
def test_outputs_have_recorded_names_only(release: Release, name: str) -> None:
    cls = getattr(import_module("trtllm_standin.results"), name)
    found = {*vars(cls), *getattr(cls, "__dataclass_fields__", ())}
    own = {each for each in found if not each.startswith("_")} - {"extend"}
    assert own <= release.names_in(name)


def test_parameters(release: Release) -> None:
    methods = [name for name, entry in release.entries.items() if name.startswith("LLM.") and "parameters" in entry]
    assert len(methods) > 3
    llm = import_module("tensorrt_llm").LLM
    for name in {*methods} - {"LLM._collective_rpc"}:
        function = getattr(llm, name.partition(".")[2])
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        found = [(p.name, p.kind.name.lower(), "(required)" if p.default is p.empty else p.default) for p in parameters]
        assert not inspect.iscoroutinefunction(function)
        recorded = release.entries[name]["parameters"]
        assert found == [(p["name"], p["kind"], p.get("default", "(required)")) for p in recorded], name


@pytest.mark.parametrize("name", USED)
def test_names_that_the_engine_uses_exist(release: Release, name: str) -> None:
    used = {*USED[name].get("", "").split(), *USED[name].get(release.version, "").split()}
    if ONLY_IN.get(name, release.version) != release.version:
        assert name not in release.entries
    else:
        assert used <= release.names_in(name)


def test_every_key_that_is_read_of_the_statistics_is_recorded() -> None:
    """The keys are strings in camel case, which nothing else in the module is."""
    used = {key for keys in USED["stats"].values() for key in keys.split()}
    texts = {
        node.value for node in ast.walk(ast.parse(inspect.getsource(statistics))) if isinstance(node, ast.Constant)
    }
    camel = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+([A-Z][a-z]*)+", text)}
    assert len(camel) > 10
    assert camel <= used


@pytest.mark.parametrize("version", VERSIONS)
def test_every_row_names_its_source_and_every_source_its_commit(version: str) -> None:
    recorded = table(version)
    for name, entry in recorded["entries"].items():
        rows = entry.values() if name == "public imports" else [entry]
        for row in rows:
            assert row["sources"], name
            assert set(row["sources"]) <= recorded["sources"].keys(), name
    for source in recorded["sources"].values():
        assert re.search(r"@ [0-9a-f]{40}|commit not known|pull requests", source), source
