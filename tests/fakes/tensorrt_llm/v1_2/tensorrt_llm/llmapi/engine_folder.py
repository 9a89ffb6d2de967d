"""Compiled engines: 1.2's legacy backend. 1.2.1: llmapi/llm.py, _TrtLLM; layout: builder.py, EngineConfig."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_standin.folder import ModelFacts, read_json, read_model
from trtllm_standin.llm import StandInLLM
from trtllm_standin.scheduler import Limits

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm_args import TrtLlmArgs

log = logging.getLogger(__name__)
REQUIRED = ("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens")


class EngineFolderLLM(StandInLLM):
    """Serves a folder with config.json and a file for each rank; its sampler is the C++ one, which honours everything."""

    args: TrtLlmArgs

    def _read_facts(self) -> ModelFacts:
        folder = Path(self.args.model)
        config = read_json(folder / "config.json")
        if "build_config" not in config:
            raise NotImplementedError("the stand-in builds no engine: give it the folder of a built one")
        self._engine_dir = folder
        # Missing keys are KeyErrors there as well.
        self._built = {key: config["build_config"][key] for key in REQUIRED}
        self._check_ranks(folder, config)
        self._check_version(config["version"])
        facts = config["pretrained_config"]
        return replace(
            read_model(folder), vocab_size=facts["vocab_size"], max_positions=facts["max_position_embeddings"]
        )

    def _check_ranks(self, folder: Path, config: dict[str, Any]) -> None:
        mapping = config["pretrained_config"]["mapping"]
        for name, asked in (
            ("tp_size", self.args.tensor_parallel_size),
            ("pp_size", self.args.pipeline_parallel_size),
            ("cp_size", self.args.context_parallel_size),
        ):
            built = mapping.get(name, 1)
            if asked not in (1, built):
                raise ValueError(f"{name} {asked} from the LLM args is different from the engine's {name} {built}")
        self._ranks = mapping["world_size"]
        for rank in range(self._ranks):
            if not (folder / f"rank{rank}.engine").is_file():
                raise RuntimeError(f"Error opening engine file: {folder / f'rank{rank}.engine'}")
        if self._settings.gpus < self._ranks:
            raise RuntimeError(f"Only {self._settings.gpus} GPUs are available, but {self._ranks} are required.")

    def _check_version(self, built_by: str) -> None:
        """An engine runs on the version that built it; another one's runtime cannot read it."""
        if built_by.split(".")[:2] != self.release.version.split(".")[:2]:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine.")

    def _limits(self) -> Limits:
        """Batch and token limits above the built ones are cut, down to a warning; the other built ones replace what was
        asked for."""
        args, built = self.args, self._built
        args.max_batch_size = self._cut("max_batch_size", args.max_batch_size)
        args.max_num_tokens = self._cut("max_num_tokens", args.max_num_tokens)
        args.max_seq_len, args.max_beam_width = built["max_seq_len"], built["max_beam_width"]
        args.max_input_len = built["max_input_len"]
        return super()._limits()

    def _cut(self, name: str, asked: int | None) -> int:
        built = int(self._built[name])
        if asked is not None and asked > built:
            log.warning("%s %s is larger than the engine's %s, and is cut to it", name, asked, built)
        return built if asked is None else min(asked, built)

    @property
    def _world_size(self) -> int:
        return int(self.__dict__.get("_ranks", 1))

    @property
    def _uses_trtllm_sampler(self) -> bool:
        return True

    @property
    def _collects_stats(self) -> bool:
        return self.args.iter_stats_max_iterations != 0

    @property
    def _max_stats_len(self) -> int:
        return self.args.iter_stats_max_iterations or 1000

    @property
    def _on_trt_backend(self) -> bool:
        return True

    def _check_arguments(self, prompt_len: int, query_len: int, sampling_params: Any) -> None:  # noqa: ANN401 - SamplingParams
        """More than the PyTorch backend looks at, and with other errors."""
        args, max_seq_len = self.args, self._built["max_seq_len"]
        length = prompt_len / args.context_parallel_size
        max_tokens = sampling_params.max_tokens or 0
        if not args.enable_chunked_prefill and length + query_len + max_tokens > max_seq_len:
            raise ValueError(
                f"The sum of prompt length ({length}) and query length ({query_len}) max_tokens ({max_tokens}) should not "
                f"exceed max_seq_len ({max_seq_len})"
            )
        if sampling_params.use_beam_search and sampling_params.best_of > self._built["max_beam_width"]:
            raise ValueError(
                f"sampling_params's n ({sampling_params.n}) should not exceed max_beam_width "
                f"({self._built['max_beam_width']}) when use_beam_search is True"
            )
        if sampling_params.prompt_logprobs and not getattr(args.build_config, "gather_context_logits", False):
            raise ValueError(
                f"`sampling_params.prompt_logprobs={sampling_params.prompt_logprobs}` requires `gather_context_logits=True` "
                "in the `BuildConfig`"
            )
        if sampling_params.logprobs and not args.gather_generation_logits:
            raise ValueError(
                f"`sampling_params.logprobs={sampling_params.logprobs}` requires `gather_generation_logits=True` to be "
                "passed to the `LLM` class"
            )
