"""PyExecutor: the engine of the worker process, over the stand-in's engine. Its methods are those that base_worker.py calls."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

from trtllm_standin import results as standin
from trtllm_standin.engine import Engine
from trtllm_standin.llm import StandInLLM
from trtllm_standin.sequences import Sequence

from trtllm_real.bindings import FinishReason, Request, Response, Result

FINISH = {
    None: FinishReason.NOT_FINISHED,
    standin.FinishReason.END_ID: FinishReason.END_ID,
    standin.FinishReason.STOP_WORDS: FinishReason.STOP_WORDS,
    standin.FinishReason.LENGTH: FinishReason.LENGTH,
    standin.FinishReason.CANCELLED: FinishReason.CANCELLED,
}


class _Reader:
    """Stands for the result of a request, to which the stand-in's engine delivers."""

    def __init__(self, request_id: int, client_id: int) -> None:
        self.request_id, self.client_id = request_id, client_id
        self._logprobs: list[dict[int, Any]] = []
        self._steps = 0

    def response(self, item: Any) -> Response:  # noqa: ANN401 - an item of the stand-in
        """Convert an item."""
        if not isinstance(item, standin.Response):
            return Response(self.client_id, self.request_id, error_msg=item.error_msg)
        self._steps += 1
        if item.logprobs is not None:
            self._logprobs = [*self._logprobs, *item.logprobs]
        result = Result(
            is_final=item.finish is not None,
            output_token_ids=[item.tokens],
            finish_reasons=[FINISH[item.finish]],
            log_probs=None if item.logprobs is None else [self._logprobs],
            cached_tokens=item.cached_tokens,
            decoding_iter=self._steps,
        )
        return Response(self.client_id, self.request_id, result)


class _Engine(Engine):
    """Delivers to a queue of this process instead of an event loop."""

    responses: SimpleQueue[Response]

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._inbox.put(sequence)

    def _hand_over(self) -> None:
        items, self._items = self._items, []
        if not self._is_mute:
            for reader, item in items:
                self.responses.put(reader.response(item))  # type: ignore[attr-defined]


class _Model(StandInLLM):
    """The part of the stand-in's LLM that is behind its executor."""

    engine_class = _Engine

    def __init__(self, args: Any) -> None:  # noqa: ANN401 - TorchLlmArgs
        self.args = args
        self._executor = None


class PyExecutor:
    """The engine."""

    kv_cache_transceiver = None

    def __init__(self, llm_args: Any) -> None:  # noqa: ANN401 - TorchLlmArgs
        from tensorrt_llm import __version__
        from trtllm_standin.recorded import Recorded
        from trtllm_standin.release import RELEASES

        release = ".".join(__version__.split(".")[:2])
        recorded = Recorded(release)
        for name, entry in recorded.entries.items():
            if name.endswith("DecodingConfig") and "fields" in entry:
                recorded.build(name)
        model = _Model(llm_args)
        _Model.release, _Model.classes = RELEASES[release], recorded.classes
        self._model, self._engine = model, model.make_engine()
        self._engine.responses = self._responses = SimpleQueue()
        self._ids = itertools.count(1)
        self._error: Exception | None = None
        self.max_seq_len = model.limits.max_seq_len
        lora_manager = _LoraManager()
        self.resource_manager = SimpleNamespace(
            resource_managers=SimpleNamespace(get=lambda _: SimpleNamespace(get_lora_manager=lambda: lora_manager))
        )
        self.model_engine = SimpleNamespace(lora_model_config=object())
        self._engine.start(lambda _: None, self._die)

    def _die(self, error: Exception) -> None:
        self._error = error

    def can_enqueue_requests(self) -> bool:
        """True for the first rank."""
        return True

    def enqueue_request(self, request: Request, *_: object, **__: object) -> int:
        """Add a request; return its id. Raises ValueError."""
        given: Any = request
        request_id = next(self._ids)
        sampling = {name: value for name, value in vars(given.sampling_config).items() if value is not None}
        recorder = self._model.recorder
        scheduling = getattr(given, "py_scheduling_params", None)  # base_worker.py sets it
        lora = given.lora_config and given.lora_config.config
        recorder.write(
            "request",
            id=request_id,
            prompt=given.input_token_ids,
            sampling=sampling,
            cache_salt=given.cache_salt_id,
            **({} if scheduling is None else {"rank": scheduling.attention_dp_rank}),
            **({"lora": [lora.lora_name, lora.lora_int_id, lora.lora_path]} if lora else {}),
        )
        guide = given.guided_decoding_params
        params = SimpleNamespace(
            max_tokens=given.max_tokens,
            ignore_eos=given.end_id == -1,
            end_id=given.end_id,
            stop_token_ids=[word[0] for word in given.stop_words or ()],
            logprobs=given.py_num_logprobs,
            prompt_logprobs=None,
            guided_decoding=guide
            and SimpleNamespace(json=None, regex=None, grammar=None, **{guide.guide_type.value: guide.guide}),
        )
        try:
            reader: Any = _Reader(request_id, given.client_id)
            sequence = self._model.sequence(
                reader, given.input_token_ids, params, lora, given.cache_salt_id, scheduling
            )
        except Exception:
            recorder.write("end", id=request_id, reason="error", tokens=0)
            raise
        self._engine.submit(sequence)
        return request_id

    def await_responses(self, timeout: timedelta) -> list[Response]:
        """Return the responses there are; waits for one. Raises the error of an engine that died, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        try:
            found = [self._responses.get(timeout=timeout.total_seconds())]
        except Empty:
            return []
        return found + [self._responses.get_nowait() for _ in range(self._responses.qsize())]

    def cancel_request(self, request_id: int) -> None:
        """Cancel a request."""
        self._model.recorder.write("abort", id=request_id)
        self._engine.cancel(request_id)

    def get_latest_iteration_stats(self) -> list[tuple[Any, None]]:
        """Return the entries that were not read before."""
        entries = self._engine.statistics
        taken = [entries.popleft() for _ in range(len(entries))]
        return [(SimpleNamespace(to_json_str=lambda entry=entry: json.dumps(entry)), None) for entry in taken]

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Near 1.3."""
        limits = self._model.limits
        return {"maxNumBlocks": limits.max_num_blocks, "tokensPerBlock": limits.block_size}

    def get_latest_kv_cache_events(self) -> list[object]:
        """Return none."""
        return []

    def shutdown(self) -> None:
        """End the loop; waits for it without a limit."""
        self._model.recorder.write("shutdown")
        self._engine.stop()
        self._engine.join()


class _LoraManager:
    """The adapters in the memory of the host; the engine loads them (`trtllm_standin.lora`)."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def is_adapter_in_cpu_cache(self, adapter: int) -> bool:
        """True if it was loaded."""
        return str(adapter) in self._paths

    def load_from_ckpt(self, paths: list[str], *, uids: list[str], **_: object) -> list[str]:
        """Load adapters; return those that were not."""
        new = [uid for uid in uids if uid not in self._paths]
        self._paths |= dict(zip(uids, paths, strict=True))
        return new

    @property
    def cpp_lora_weights(self) -> dict[str, None]:
        """Adapter → nothing."""
        return dict.fromkeys(self._paths)

    @property
    def cpp_lora_config(self) -> dict[str, Any]:
        """Adapter → a request for it."""
        return {
            uid: SimpleNamespace(lora_name=uid, lora_int_id=int(uid), lora_path=path)
            for uid, path in self._paths.items()
        }
