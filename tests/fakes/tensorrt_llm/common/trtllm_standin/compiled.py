"""The backend of 1.2 for compiled engines. 1.2.1: _TrtLLM in llmapi/llm.py; layout: EngineConfig in builder.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_standin.folder import ModelFacts, read_json, read_model
from trtllm_standin.llm import StandInLLM
from trtllm_standin.scheduler import Limits

LIMITS = ("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens")


class CompiledLLM(StandInLLM):
    """Serves a folder with config.json and a file per rank. Its sampler is the C++ one, which supports everything."""

    _built: dict[str, int]

    def _world_size(self) -> int:
        config = read_json(Path(self.args.model) / "config.json")
        if "build_config" not in config:
            raise NotImplementedError("the stand-in builds no engines: it needs the folder of a built one")
        return int(config["pretrained_config"]["mapping"]["world_size"])

    def _read_facts(self) -> ModelFacts:
        folder = Path(self.args.model)
        config = read_json(folder / "config.json")
        self._built = {key: config["build_config"][key] for key in LIMITS}  # KeyError, as in the library
        pretrained = config["pretrained_config"]
        for name, given in (
            ("tp_size", self.args.tensor_parallel_size),
            ("pp_size", self.args.pipeline_parallel_size),
            ("cp_size", self.args.context_parallel_size),
        ):
            built = pretrained["mapping"].get(name, 1)
            if given not in (1, built):
                raise ValueError(f"{name} {given} from the LLM args is different from the engine's {name} {built}")
        positions = pretrained["max_position_embeddings"]
        return replace(read_model(folder), vocab_size=pretrained["vocab_size"], max_positions=positions)

    def _limits(self) -> Limits:
        """Batch and token limits are reduced to those of the build; the others are replaced by them."""
        args, built = self.args, self._built
        args.max_batch_size = min(args.max_batch_size or built["max_batch_size"], built["max_batch_size"])
        args.max_num_tokens = min(args.max_num_tokens or built["max_num_tokens"], built["max_num_tokens"])
        args.max_seq_len, args.max_input_len = built["max_seq_len"], built["max_input_len"]
        return super()._limits()

    def _uses_cxx_sampler(self) -> bool:
        return True

    def _collects_stats(self) -> bool:
        return bool(self.args.iter_stats_max_iterations != 0)

    def _check_arguments(self, prompt_len: int, sampling_params: Any) -> None:  # noqa: ANN401 - SamplingParams
        """Check more than the PyTorch backend, with other errors."""
        args, max_seq_len = self.args, self._built["max_seq_len"]
        max_tokens = sampling_params.max_tokens or 0
        if not args.enable_chunked_prefill and prompt_len + max_tokens > max_seq_len:
            raise ValueError(
                f"The sum of prompt length ({prompt_len}) and query length (0) max_tokens ({max_tokens}) should not "
                f"exceed max_seq_len ({max_seq_len})"
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
