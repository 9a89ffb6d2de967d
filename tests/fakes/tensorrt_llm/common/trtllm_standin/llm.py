"""LLM: reads arguments, builds the engine, checks and submits requests. 1.2.1: llmapi/llm.py."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trtllm_standin.engine import Engine
from trtllm_standin.executor import GenerationExecutor
from trtllm_standin.folder import ModelFacts, read_model
from trtllm_standin.guides import GuidedDecoder, Tokenizer, load_tokenizer
from trtllm_standin.inspection import Recorder, changed_fields, plain
from trtllm_standin.release import SAMPLING_EXTRAS, Release
from trtllm_standin.results import RequestOutput
from trtllm_standin.scheduler import Limits
from trtllm_standin.settings import Settings
from trtllm_standin.statistics import Statistics
from trtllm_standin.worker import Worker

if TYPE_CHECKING:
    from trtllm_standin.results import IterationResult, NothingYet

log = logging.getLogger(__name__)
KV_TOKENS = 65536
"""Size of the KV cache unless kv_cache_config.max_tokens is set."""
IGNORED = ("kv_cache_retention_config", "scheduling_params", "trace_headers", "priority")
"""Arguments of generate_async without effect here; all others that are not imitated must be None."""


class StandInLLM:
    """An LLM. `package` adds the recorded signatures of a release."""

    RECORDED_METHODS: ClassVar[dict[str, Callable[..., Any]]]
    """Methods whose signature differs between releases, without those that are not imitated."""
    release: ClassVar[Release]
    args_class: ClassVar[Any]
    sampling_class: ClassVar[type[Any]]
    args: Any
    _executor: GenerationExecutor | None

    def _construct(self, kwargs: dict[str, Any], **arguments: Any) -> None:  # noqa: ANN401 - of any type
        self._executor = None
        for key in kwargs:
            if key not in {*self.args_class.model_fields, "_mpi_session", "backend"}:
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        self.args = self.args_class(**arguments, **kwargs)
        self._settings = Settings.read()
        self._recorder = Recorder(self._settings.log)
        values = {**plain(arguments), **{key: plain(value) for key, value in kwargs.items()}}
        self._recorder.write("llm", version=self.release.version, arguments=values)
        self._ranks = self._world_size()
        self._facts = self._read_facts()
        self.tokenizer = None if self.args.skip_tokenizer_init else load_tokenizer(Path(self.args.model))
        self._build()
        atexit.register(_shut_down, weakref.ref(self))

    def _build(self) -> None:
        backend = self.args.guided_decoding_backend
        extras = SAMPLING_EXTRAS if self._uses_cxx_sampler() else self.release.sampling_extras
        try:
            guided = None if backend is None else GuidedDecoder(backend, self.tokenizer)
            worker = Worker(
                release=self.release,
                limits=self._limits(),
                sampling_extras=extras,
                default_seed=0 if self._uses_cxx_sampler() else None,
                faults=self._settings.faults,
                guided=guided,
            )
        except Exception as error:
            # proxy.py: an error in the worker is the cause of this one.
            raise RuntimeError("Executor worker returned error") from error
        statistics = None
        if self._collects_stats():
            statistics = Statistics(detailed=self.release.detailed_stats)
        engine = Engine(worker.limits, self._settings, self.release, self._recorder, statistics)
        self._executor = GenerationExecutor(engine, worker, self._settings, self._recorder, ranks=self._ranks)

    # ----------------------------------------------------------------------- what the backend for compiled engines changes

    def _world_size(self) -> int:
        args = self.args
        return int(args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size)

    def _read_facts(self) -> ModelFacts:
        return read_model(Path(self.args.model))

    def _uses_cxx_sampler(self) -> bool:
        return str(getattr(self.args, "sampler_type", "")) == "TRTLLMSampler"

    def _collects_stats(self) -> bool:
        return bool(self.args.enable_iter_perf_stats)

    def _limits(self) -> Limits:
        """The limits of the engine. max_seq_len is reduced to the KV cache with a warning (pyexecutor, _util.py)."""
        args = self.args
        if getattr(args.scheduler_config.capacity_scheduler_policy, "value", "") != "GUARANTEED_NO_EVICT":
            raise NotImplementedError("the stand-in imitates the capacity policy GUARANTEED_NO_EVICT only")
        cache = args.kv_cache_config
        blocks = -(-(cache.max_tokens or KV_TOKENS) // cache.tokens_per_block)
        return Limits(
            max_batch_size=args.max_batch_size or 2048,
            max_num_tokens=args.max_num_tokens,
            max_seq_len=min(args.max_seq_len or self._facts.max_positions, blocks * cache.tokens_per_block),
            chunked_prefill=args.enable_chunked_prefill,
            vocab_size=self._facts.vocab_size,
            num_blocks=blocks,
            block_size=cache.tokens_per_block,
            stream_interval=getattr(args, "stream_interval", 1),
            reuses_blocks=cache.enable_block_reuse,
        )

    def _check_arguments(self, prompt_len: int, sampling_params: Any) -> None:  # noqa: ANN401 - SamplingParams
        """Raise an exception for a request that the backend refuses at once."""

    # ---------------------------------------------------------------------------------------------------------------- use

    def shutdown(self) -> None:
        """Stop. May hang: see GenerationExecutor.shutdown."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult | NothingYet:
        """Return statistics of iterations not read before, as an asynchronous iterable."""
        assert self._executor is not None
        return self._executor.aget_stats(timeout or 0)

    def _check_health(self) -> bool:
        """1.2.1: False only after shutdown. Main: False as well if the engine is dead (PR #12718)."""
        executor = self._executor
        return executor is not None and not executor.is_shutdown() and not executor.is_known_dead

    def __del__(self) -> None:
        if self.__dict__.get("_executor") is not None:
            self.shutdown()

    def _get_kv_cache_capacity(self) -> dict[str, int]:
        assert self._executor is not None
        return self._executor.get_kv_cache_capacity()

    def _generate_async(
        self,
        inputs: Any,  # noqa: ANN401 - PromptInputs
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        streaming: bool,
        cache_salt: str | None,
        **others: Any,  # noqa: ANN401 - arguments of some releases
    ) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        description = {}
        if self._recorder.is_on:
            is_params = isinstance(sampling_params, self.sampling_class)
            sampling = changed_fields(sampling_params) if is_params else None
            description = {"sampling": sampling, "with": {"streaming": streaming, "cache_salt": cache_salt}}
        params = self._prepare(sampling_params)
        for name, value in others.items():
            if value is not None and name not in IGNORED:
                raise NotImplementedError(f"the stand-in does not imitate {name}")
        token_ids = inputs.get("prompt_token_ids") if isinstance(inputs, dict) else inputs
        if not isinstance(token_ids, list):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        self._check_arguments(len(token_ids), params)
        # The caller's object is modified.
        if params._stream_interval is None:
            params._stream_interval = getattr(self.args, "stream_interval", 1)
        return self._executor.generate_async(
            token_ids, params, streaming=streaming, cache_salt=cache_salt, description=description
        )

    def _prepare(self, sampling_params: Any) -> Any:  # noqa: ANN401 - see _generate_async
        if sampling_params is None:
            sampling_params = self.sampling_class()
        if not isinstance(sampling_params, self.sampling_class):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(sampling_params)}")
        if sampling_params.end_id is None:
            raise ValueError("the stand-in needs end_id; the library would take it from a tokenizer")
        return sampling_params

    tokenizer: Tokenizer | None


StandInLLM.RECORDED_METHODS = {
    "__init__": StandInLLM._construct,
    "generate_async": StandInLLM._generate_async,
    "get_kv_cache_capacity": StandInLLM._get_kv_cache_capacity,
}


def _shut_down(reference: weakref.ref[StandInLLM]) -> None:
    """Shut down at the interpreter's exit, where it may hang as well."""
    llm = reference()
    if llm is not None:
        llm.shutdown()
