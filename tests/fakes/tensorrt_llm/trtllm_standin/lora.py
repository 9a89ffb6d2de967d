"""LoRA: requests with an adapter, and the conditions under which it changes their tokens (lora_manager.py, resource_manager.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_standin.release import Release


class LoRARequestMethods:
    """Behaviour of LoRARequest. 1.2.1: executor/request.py."""

    __slots__ = ()

    def __post_init__(self) -> None:
        path: str | None = getattr(self, "lora_path", None)
        if path is not None and not Path(path).exists():
            raise ValueError(f"lora_path ({path}) does not exist.")


class LoraManager:
    """The adapters of an engine, loaded by the first request that names them."""

    def __init__(self, args: Any, release: Release) -> None:  # noqa: ANN401 - TorchLlmArgs
        config = args.lora_config
        self._config: dict[str, Any] | None = config.model_dump() if hasattr(config, "model_dump") else config
        if self._config is not None:
            assert self._config.get("lora_target_modules"), "Expecting at least one lora target module"
        # PR #5480: a graph that was captured without adapters computes the model alone. PR #8279 fixed it.
        self._is_ignored = getattr(args, "cuda_graph_config", None) is not None and not release.graphs_have_adapters
        self._names: dict[int, str] = {}

    def load(self, request: Any) -> int:  # noqa: ANN401 - LoRARequest
        """Return the number of the adapter that changes the tokens; 0: none does. Raises ValueError if it cannot be loaded."""
        if request is None:
            return 0
        if self._config is None:
            raise ValueError("LoRA is not enabled: a request has a lora_request")
        if self._names.setdefault(request.lora_int_id, request.lora_name) != request.lora_name:
            raise ValueError("two adapters have one lora_int_id")
        settings = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        if int(settings["r"]) > self._config["max_lora_rank"]:
            raise ValueError(f"rank {settings['r']} is above max_lora_rank {self._config['max_lora_rank']}")
        if len(self._names) > (self._config.get("max_cpu_loras") or 1):
            raise ValueError("the LoRA cache is full")
        names = {hf: name for name, hf in self._config["trtllm_modules_to_hf_modules"].items()}
        modules = {names.get(module) for module in settings["target_modules"]}
        # "LoRA module … not in target modules …, skipping."
        is_loaded = modules <= set(self._config["lora_target_modules"])
        return request.lora_int_id if is_loaded and not self._is_ignored else 0
