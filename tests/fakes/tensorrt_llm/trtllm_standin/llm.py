"""LLM: reads arguments, builds the engine, checks and submits requests. 1.2.1: llmapi/llm.py, base_worker.py."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trtllm_standin.engine import Engine, Limits
from trtllm_standin.executor import GenerationExecutor
from trtllm_standin.folder import read_json, read_model
from trtllm_standin.guides import GuidedDecoder
from trtllm_standin.inspection import Recorder, changed_fields
from trtllm_standin.lora import LoraManager
from trtllm_standin.release import Release
from trtllm_standin.results import RequestError, RequestOutput
from trtllm_standin.sequences import Sequence
from trtllm_standin.settings import Settings
from trtllm_standin.speculation import read_speculation, unsupported_sampling

KV_TOKENS = 65536
"""Size of the KV cache unless kv_cache_config.max_tokens is set."""
BYTES_PER_BLOCK = 1 << 20


class StandInLLM:
    """An LLM. `package` adds the recorded signatures of a release."""

    RECORDED_METHODS: ClassVar[dict[str, Callable[..., Any]]]
    """Methods whose signature differs between releases, without those that are not imitated."""
    release: ClassVar[Release]
    args_class: ClassVar[Any]
    classes: ClassVar[Mapping[str, Any]]
    """The recorded classes of the release."""
    engine_class: ClassVar[type[Engine]] = Engine
    args: Any
    recorder: Recorder
    limits: Limits
    _executor: GenerationExecutor | None

    def _construct(self, kwargs: dict[str, Any], **arguments: Any) -> None:  # noqa: ANN401 - of any type
        self._executor = None
        for key in kwargs:
            if key not in {*self.args_class.model_fields, "_mpi_session", "backend"}:
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        self.args = self.args_class(**arguments, **kwargs)
        try:
            engine = self.make_engine()
        except Exception as error:
            # proxy.py: an error in the worker is the cause of this one.
            raise RuntimeError("Executor worker returned error") from error
        if self.release.reports_usage and os.environ.get("TRTLLM_NO_USAGE_STATS") != "1":
            self.recorder.write("usage")
        ranks = self.args.tensor_parallel_size * self.args.pipeline_parallel_size * self.args.context_parallel_size
        self._executor = GenerationExecutor(
            engine,
            self.release,
            self._settings,
            self.recorder,
            ranks=ranks,
        )
        atexit.register(_shut_down, weakref.ref(self))

    def make_engine(self) -> Engine:
        """Build the engine for `args`, as a worker does. Raises any error."""
        self._settings = Settings()
        self.recorder = Recorder(self._settings.log)
        names = ("tensor_parallel_size", "trust_remote_code", "num_postprocess_workers")
        fraction = self.args.kv_cache_config.free_gpu_memory_fraction
        self.recorder.write(
            "start", free_gpu_memory_fraction=fraction, **{name: getattr(self.args, name) for name in names}
        )
        folder = Path(self.args.model)
        self._generation_config = read_json(folder / "generation_config.json")
        self._speculation = read_speculation(
            self.args.speculative_config, self.classes, by_type=self.release.types_speculation
        )
        self._check_combination()
        self.limits = self._read_limits()
        self._loras = LoraManager(self.args, self.release)
        backend = self.args.guided_decoding_backend
        self._guided = None
        if backend is not None:
            # py_executor_creator.py, get_guided_decoding_config: without a tokenizer the executor is not created.
            assert not self.args.skip_tokenizer_init, "tokenizer is not None"
            self._guided = GuidedDecoder(backend, folder)
        compiled = isinstance(self, CompiledLLM)
        return self.engine_class(
            self.limits, self._settings, self.recorder, self.release, self._speculation, compiled=compiled
        )

    def _check_combination(self) -> None:
        """Raise ValueError for options that exclude each other (validate_feature_combination, near 1.2.1)."""
        sampler = getattr(self.args, "sampler_type", "")
        kind = "" if self._speculation is None else self._speculation.kind
        if getattr(sampler, "value", sampler) == "TRTLLMSampler" and kind.startswith(("MTP", "Eagle")):
            raise ValueError("TRTLLMSampler is not supported with MTP or EAGLE3")
        if self._speculation is not None and self.args.pipeline_parallel_size > 1:
            # py_executor.py, after the weights are loaded; drafters in the model are not checked (feature-combination-matrix.md).
            raise NotImplementedError("Drafting is not supported for selected executor loop")

    def _read_limits(self) -> Limits:
        """max_seq_len is reduced to the KV cache with a warning (pyexecutor, _util.py)."""
        args, facts = self.args, read_model(Path(self.args.model))
        if getattr(args.scheduler_config.capacity_scheduler_policy, "value", "") != "GUARANTEED_NO_EVICT":
            raise NotImplementedError("the stand-in imitates the capacity policy GUARANTEED_NO_EVICT only")
        cache = args.kv_cache_config
        blocks = -(-(cache.max_tokens or KV_TOKENS) // cache.tokens_per_block)
        # A larger one than the model's is clamped with a warning (_init_max_seq_len).
        longest = min(args.max_seq_len or facts.max_positions, facts.max_positions, blocks * cache.tokens_per_block)
        # Windows are cut to the longest sequence (resource_manager.py, is_vswa), and have as many blocks each (kvCacheManager.cpp,
        # note at calculateWindowSizeToShare).
        windows = {min(window, longest) for window in cache.max_attention_window or [longest]}
        return Limits(
            max_batch_size=args.max_batch_size or 2048,
            max_num_tokens=args.max_num_tokens,
            max_seq_len=longest,
            vocab_size=facts.vocab_size,
            windows=dict.fromkeys(windows, blocks),
            block_size=cache.tokens_per_block,
            host_blocks=(cache.host_cache_size or 0) // BYTES_PER_BLOCK,
            ranks=args.tensor_parallel_size if args.enable_attention_dp else 1,
            reuses_blocks=cache.enable_block_reuse,
        )

    def shutdown(self) -> None:
        """Stop. May hang: see GenerationExecutor.shutdown."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Return statistics of iterations not read before, as an asynchronous iterable."""
        assert self._executor is not None
        return self._executor.stats(timeout or 0)

    def _get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        assert self._executor is not None
        if not self.release.blocks_for_stats:
            raise NotImplementedError("the stand-in imitates get_stats of 1.3: that of 1.2 reads the queue of a loop")
        return self._executor.fetch_stats()

    def _check_health(self) -> bool:
        """1.2.1: False only after shutdown. Main: False as well if the engine is dead (PR #12718)."""
        executor = self._executor
        return executor is not None and not executor.is_shutdown() and not executor.is_known_dead

    def _generate_async(
        self,
        inputs: Any,  # noqa: ANN401 - PromptInputs
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        streaming: bool,
        cache_salt: str | None,
        lora_request: Any = None,  # noqa: ANN401 - LoRARequest
        priority: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        scheduling_params: Any = None,  # noqa: ANN401 - SchedulingParams
        **_: Any,  # noqa: ANN401 - arguments of some releases
    ) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, dict):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if self._speculation is not None and self.release.refuses_speculative_logprobs:
            if sampling_params.logprobs is not None:
                raise ValueError("logprobs are not supported with speculative decoding")
            if self._speculation.one_model and (refusal := unsupported_sampling(sampling_params)):
                raise RequestError(refusal)
        if self._speculation is not None and not self._speculation.samples and sampling_params.top_k != 1:
            self.recorder.write("greedy")
        if not streaming or sampling_params.end_id is None:
            raise NotImplementedError("the stand-in streams, and takes no end_id from a tokenizer")
        prompt = inputs["prompt_token_ids"]
        self._trace(trace_headers)
        self._fill_in(sampling_params)
        description = {}
        if self.recorder.is_on:
            description = {"sampling": changed_fields(sampling_params), "cache_salt": cache_salt}
            if priority is not None:
                description["priority"] = priority
            if scheduling_params is not None:
                description["rank"] = scheduling_params.attention_dp_rank
            if lora_request is not None:
                description["lora"] = [lora_request.lora_name, lora_request.lora_int_id, lora_request.lora_path]
        return self._executor.generate_async(
            prompt,
            lambda result: self.sequence(
                result, prompt, sampling_params, lora_request, cache_salt, scheduling=scheduling_params
            ),
            keeps_stop=sampling_params.include_stop_str_in_output,
            description=description,
        )

    def _trace(self, headers: Mapping[str, str] | None) -> None:
        """Make a span of a request: result.py, do_tracing makes none without metrics of the request."""
        if self.args.otlp_traces_endpoint and self.args.return_perf_metrics and headers is not None:
            self.recorder.write("span", **headers)

    def _fill_in(self, params: Any) -> None:  # noqa: ANN401 - SamplingParams
        """Take what a request leaves out from generation_config.json (1.3.0rc29)."""
        if getattr(self.args, "generation_config", "trtllm") == "auto" and params.top_k is None:
            params.top_k = self._generation_config.get("top_k")

    def sequence(
        self,
        result: RequestOutput,
        prompt: list[int],
        params: Any,  # noqa: ANN401 - SamplingParams
        lora_request: Any,  # noqa: ANN401 - LoRARequest
        salt: str | None,
        scheduling: Any,  # noqa: ANN401 - SchedulingParams
    ) -> Sequence:
        """Return the sequence of a request. Raises ValueError if it cannot be served."""
        if params.max_tokens <= 0:
            raise ValueError(f"`max_tokens` ({params.max_tokens}) must be greater than 0")
        ignores_stops = params.ignore_eos and self.release.ignores_stops_with_eos
        # py_executor.py silently ignores a guide without a decoder.
        guide = None if self._guided is None else params.guided_decoding
        return Sequence(
            result,
            prompt,
            # Silently reduced: the sequence then ends early, by length.
            limit=min(params.max_tokens, self.limits.max_seq_len - len(prompt)),
            end_id=-1 if params.ignore_eos else params.end_id,
            stop_token_ids=frozenset(() if ignores_stops else params.stop_token_ids or ()),
            top=params.logprobs,
            prompt_top=params.prompt_logprobs,
            vocab_size=self.limits.vocab_size,
            faults=self._settings.faults,
            adapter=self._loras.load(lora_request),
            root=(salt, None if lora_request is None else lora_request.lora_int_id),
            guide=None if self._guided is None or guide is None else self._guided.follow(guide, params.end_id),
            scheduling=scheduling,
        )


class CompiledLLM(StandInLLM):
    """The backend of 1.2 for compiled engines: a folder with config.json and a file per rank (_TrtLLM in llmapi/llm.py)."""

    def _read_limits(self) -> Limits:
        """Batch and token limits are reduced to those of the build; the others are replaced by them."""
        args, config = self.args, read_json(Path(self.args.model) / "config.json")
        built = config["build_config"]
        for name in ("max_batch_size", "max_num_tokens"):
            setattr(args, name, min(getattr(args, name) or built[name], built[name]))
        args.max_seq_len, args.max_input_len = built["max_seq_len"], built["max_input_len"]
        return super()._read_limits()


StandInLLM.RECORDED_METHODS = {
    "__init__": StandInLLM._construct,
    "generate_async": StandInLLM._generate_async,
    "get_stats": StandInLLM._get_stats,
}


def _shut_down(reference: weakref.ref[StandInLLM]) -> None:
    """Shut down at the interpreter's exit, where it may hang as well."""
    llm = reference()
    if llm is not None:
        llm.shutdown()
