"""What both releases' LLM do: read arguments, build the engine, check and submit requests. 1.2.1: llmapi/llm.py."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from trtllm_standin.engine import Engine
from trtllm_standin.errors import RequestError
from trtllm_standin.executor import GenerationExecutor
from trtllm_standin.folder import ModelFacts, read_model
from trtllm_standin.guides import GuidedDecoder
from trtllm_standin.inspection import Recorder, changed_fields, plain
from trtllm_standin.release import SAMPLING_EXTRAS, Release
from trtllm_standin.requests import prompt_inputs
from trtllm_standin.results import GenerationResult
from trtllm_standin.scheduler import Limits
from trtllm_standin.settings import Settings
from trtllm_standin.statistics import Statistics
from trtllm_standin.terms import Worker
from trtllm_standin.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trtllm_standin.iteration import IterationResult, NothingYet

log = logging.getLogger(__name__)
KV_TOKENS = 65536
"""Size of the KV cache where kv_cache_config.max_tokens does not say."""
C_PLUS_PLUS_SAMPLER = "TRTLLMSampler"


class RequestOutputMethods:
    """Of RequestOutput: the releases' classes derive from theirs of the results'."""

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} is designed to be instantiated only by the LLM")

    @classmethod
    def _from_generation_result(
        cls, generation_result: GenerationResult, prompt: str | None = None, tokenizer: Tokenizer | None = None
    ) -> Self:
        """One that shares the queue and the outputs; whether it is done or aborted is its own affair."""
        output = cls.__new__(cls)
        output.__dict__.update(generation_result.__dict__)
        output.__dict__.update(_prompt=prompt, tokenizer=tokenizer)
        return output


class StandInLLM:
    """An LLM. The releases' classes add the signatures."""

    release: ClassVar[Release]
    executor_class: ClassVar[type[GenerationExecutor]]
    sampling_class: ClassVar[type[Any]]
    output_class: ClassVar[type[Any]]

    args: Any
    _executor: Any

    def _construct(self, args_class: Any, arguments: dict[str, Any], kwargs: dict[str, Any]) -> None:  # noqa: ANN401 - a pydantic class
        self._executor = None
        self._executor_cls = kwargs.pop("executor_cls", self.executor_class)
        self._orchestrator_type = kwargs.get("orchestrator_type")
        self._llm_id: str | None = None
        try:
            known = {*args_class.model_fields, "_mpi_session", "backend"}
            for key in kwargs:
                if key not in known:
                    raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
            self.args = args_class.from_kwargs(**arguments, **kwargs)
        except Exception as error:
            log.error("Failed to parse the arguments for the LLM constructor: %s", error)
            raise
        self.mpi_session = self.args.mpi_session
        self._settings = Settings.read()
        self._recorder = Recorder(self._settings.log)
        self._recorder.write(
            "llm",
            version=self.release.version,
            arguments={**plain(arguments), **{key: plain(value) for key, value in kwargs.items()}},
        )
        self._check_gpus()
        self._build()
        atexit.register(_shut_down, weakref.ref(self))

    def _check_gpus(self) -> None:
        needed = self._world_size
        if needed > 1 and self._settings.gpus < needed:
            raise RuntimeError(f"Only {self._settings.gpus} GPUs are available, but {needed} are required.")

    def _build(self) -> None:
        args = self.args
        self._facts = self._read_facts()
        self._tokenizer = None if args.skip_tokenizer_init else self._load_tokenizer()
        sampler = self._uses_trtllm_sampler
        try:
            guided = None
            if args.guided_decoding_backend is not None:
                guided = GuidedDecoder(args.guided_decoding_backend, self._tokenizer)
            limits = self._limits()
            worker = Worker(
                release=self.release,
                limits=limits,
                honours=SAMPLING_EXTRAS if sampler else self.release.default_sampler_honours,
                default_seed=0 if sampler else None,
                faults=self._settings.faults,
                guided=guided,
                refuses_guides=self._on_trt_backend,
            )
        except Exception as error:
            # proxy.py: what goes wrong in the worker reaches the caller as the cause of this.
            raise RuntimeError("Executor worker returned error") from error
        statistics = None
        if self._collects_stats:
            statistics = Statistics(self._max_stats_len, detailed=self.release.detailed_stats)
        engine = Engine(limits, self._settings, self.release, self._recorder, statistics)
        self._executor = self.executor_class(
            engine, worker, self._settings, self._recorder, ranks=self._world_size, uses_trtllm_sampler=sampler
        )

    def _read_facts(self) -> ModelFacts:
        return read_model(Path(self.args.model))

    def _load_tokenizer(self) -> Tokenizer | None:
        given = self.args.tokenizer
        if given is None or isinstance(given, str | Path):
            return load_tokenizer(Path(given or self.args.model))
        return given  # type: ignore[no-any-return]  # whatever has its methods

    def _limits(self) -> Limits:
        """What the engine is built for. A max_seq_len beyond the KV cache is reduced, down to a warning (the pyexecutor's
        _util.py): no sequence could ever run that long."""
        args = self.args
        if getattr(args.scheduler_config.capacity_scheduler_policy, "value", None) != "GUARANTEED_NO_EVICT":
            raise NotImplementedError(
                "the stand-in reserves the KV cache as GUARANTEED_NO_EVICT does, and no other way"
            )
        cache = args.kv_cache_config
        blocks = -(-(cache.max_tokens or KV_TOKENS) // cache.tokens_per_block)
        max_seq_len = args.max_seq_len or self._facts.max_positions
        if max_seq_len > blocks * cache.tokens_per_block:
            max_seq_len = blocks * cache.tokens_per_block
            log.warning("max_seq_len is reduced to %s, what the KV cache holds", max_seq_len)
        return Limits(
            max_batch_size=args.max_batch_size,
            max_num_tokens=args.max_num_tokens,
            max_seq_len=max_seq_len,
            max_beam_width=args.max_beam_width,
            chunked_prefill=args.enable_chunked_prefill,
            vocab_size=self._facts.vocab_size,
            num_blocks=blocks,
            block_size=cache.tokens_per_block,
            stream_interval=self._settings.stream_interval or getattr(args, "stream_interval", 1),
            reuses_blocks=cache.enable_block_reuse,
            by_priority=getattr(getattr(args.scheduler_config, "waiting_queue_policy", None), "value", "")
            == "priority",
        )

    @property
    def _world_size(self) -> int:
        args = self.args
        return int(args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size)

    @property
    def _uses_trtllm_sampler(self) -> bool:
        return str(getattr(self.args, "sampler_type", "")) == C_PLUS_PLUS_SAMPLER

    @property
    def _collects_stats(self) -> bool:
        return bool(self.args.enable_iter_perf_stats)

    @property
    def _max_stats_len(self) -> int:
        return int(self.args.max_stats_len)

    @property
    def _on_trt_backend(self) -> bool:
        return False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def llm_id(self) -> str:
        """A name for this instance."""
        if self._llm_id is None:
            self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        return self._llm_id

    def shutdown(self) -> None:
        """Stop. May hang: see GenerationExecutor.shutdown."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _check_health(self) -> bool:
        """At 1.2.1 says only that nobody has shut it down."""
        return self._executor is not None and not self._executor.is_shutdown()

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Iterations since the last call. After a shutdown: AttributeError."""
        return self._executor.get_stats(timeout=timeout)  # type: ignore[no-any-return]

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult | NothingYet:
        """The same as an asynchronous iterable."""
        return self._executor.aget_stats(timeout=timeout)  # type: ignore[no-any-return]

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """None are made."""
        return self._executor.get_kv_events(timeout=timeout)  # type: ignore[no-any-return]

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult | NothingYet:
        """None are made."""
        return self._executor.aget_kv_events(timeout=timeout)  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if self.__dict__.get("_executor") is not None:
            self.shutdown()

    def __getstate__(self) -> object:
        raise RuntimeError("LLM object can not be pickled.")

    def _submit(
        self,
        inputs: Any,  # noqa: ANN401 - PromptInputs
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        *,
        streaming: bool,
        refused: dict[str, Any],
        trace_headers: Any,  # noqa: ANN401 - passed through
        **others: Any,  # noqa: ANN401 - what only some releases know
    ) -> Any:  # noqa: ANN401 - RequestOutput of either release
        """generate_async. `refused` are arguments that are not imitated: they have to be None."""
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        description = self._describe(sampling_params, {"streaming": streaming, **others})
        sampling_params = self._prepare_sampling_params(sampling_params)
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"the stand-in does not imitate {name}")
        prompt, token_ids, query_length = self._tokens(inputs, sampling_params)
        self._check_arguments(len(token_ids), query_length, sampling_params)
        # Even where end_id was given, the object that was handed in is changed.
        if sampling_params._stream_interval is None:
            sampling_params._stream_interval = getattr(self.args, "stream_interval", 1)
        sampling_params.return_perf_metrics |= self.args.return_perf_metrics
        result = self._executor.generate_async(
            token_ids,
            sampling_params,
            streaming=streaming,
            trace_headers=trace_headers,
            description=description,
            **others,
        )
        tokenizer = self._tokenizer if sampling_params.detokenize else None
        return self.output_class._from_generation_result(result, prompt, tokenizer)

    def _describe(self, sampling_params: Any, others: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - see _submit
        """What arrived, for `inspection`."""
        if not self._recorder.is_on:
            return {}
        is_params = isinstance(sampling_params, self.sampling_class)
        return {"sampling": changed_fields(sampling_params) if is_params else None, "with": others}

    def _prepare_sampling_params(self, sampling_params: Any) -> Any:  # noqa: ANN401 - see _submit
        if sampling_params is None:
            sampling_params = self.sampling_class()
        if not isinstance(sampling_params, self.sampling_class):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(sampling_params)}")
        if sampling_params.end_id is None:
            if self._tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id for "
                    "sampling_params"
                )
            sampling_params._setup(self._tokenizer, None, self._facts)
        return sampling_params

    def _tokens(self, given: Any, sampling_params: Any) -> tuple[str | None, list[int], int]:  # noqa: ANN401 - see _submit
        """The text, if it is one; the ids; the length of the query beside them."""
        inputs: Any = prompt_inputs(given)
        if not {"prompt", "prompt_token_ids"} & inputs.keys():
            raise TypeError(f"The inputs must be type str or list of int, but got {type(given)}")
        if inputs.get("multi_modal_data") is not None:
            raise NotImplementedError("the stand-in does not imitate multi_modal_data")
        if "prompt_token_ids" in inputs:
            return inputs.get("prompt"), inputs["prompt_token_ids"], len(inputs.get("query_token_ids") or ())
        if self._tokenizer is None:
            raise ValueError("tokenizer is required to tokenize string prompt")
        text = inputs["prompt"]
        return text, self._tokenizer.encode(text, add_special_tokens=sampling_params.add_special_tokens), 0

    def _check_arguments(self, prompt_len: int, query_len: int, sampling_params: Any) -> None:  # noqa: ANN401 - see _submit
        """All that is looked at here: a prompt that fits in no step. The length is printed as what it was divided to."""
        args = self.args
        length = prompt_len / args.context_parallel_size
        if not args.enable_chunked_prefill and length + query_len > args.max_num_tokens:
            raise RequestError(
                f"The sum of prompt length ({length}), query length ({query_len}) should not exceed max_num_tokens "
                f"({args.max_num_tokens})"
            )

    def _generate(self, inputs: Any, each: dict[str, Any]) -> Any:  # noqa: ANN401 - see _submit
        """generate: one input or several, arguments for all or one each."""
        unbatched = not isinstance(inputs, list) or isinstance(inputs[0], int)
        if unbatched:
            inputs = [inputs]
        outputs = [
            self.generate_async(  # type: ignore[attr-defined]  # the releases' own
                one, **{name: value[i] if isinstance(value, list) else value for name, value in each.items()}
            )
            for i, one in enumerate(inputs)
        ]
        results = [output.result() for output in outputs]
        return results[0] if unbatched else results


def _shut_down(reference: weakref.ref[StandInLLM]) -> None:
    """At the interpreter's exit: may hang there as well."""
    llm = reference()
    if llm is not None:
        llm.shutdown()
