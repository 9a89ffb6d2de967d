"""LoRA adapters: the `lora_config` of the engine, and a `lora_request` for each adapter.

The engine loads an adapter with the first request that names it, and leaves out, with a warning, what its lora_config does not
name (lora_manager.py). So the configuration is made of all adapters, and each one is tried before clients use it.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

from text_generation_shard.adapters import LoraAdapter, LoraRoom
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.options import FLAG

MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
}
"""Names of modules in a checkpoint → TensorRT-LLM's (lora_helper.py, get_default_trtllm_modules_to_hf_modules). Those of experts
are left out: 1.2 does not compute them."""
SPLIT_ATTENTION = ("q_proj", "k_proj", "v_proj")
"""All or none of them: missing ones are filled with zeros (get_missing_qkv_modules_from_lora_modules)."""
FUSED = frozenset({"qkv_proj", "gate_up_proj"})
"""Modules of few models: an adapter that comes later may change them if one of the start does."""
OPERATORS = ("max_loras", "max_cpu_loras")
"""Fields of lora_config that the operator may set."""
GRAPHS_WITH_ADAPTERS = "tensorrt_llm._torch.peft.lora.cuda_graph_lora_manager"
"""Without this module (PR #8279) a CUDA graph computes the model without its adapters (PR #5480)."""


def lora_keywords(
    config: ShardConfig, adapters: Sequence[LoraAdapter], options: Mapping[str, object]
) -> dict[str, Any]:
    """Return the keywords of `LLM` for these adapters, and for those that may come later. Raises EngineError."""
    room = LoraRoom.of(config, adapters)
    given = options.get("lora_config", {})
    if not isinstance(given, Mapping):
        raise EngineError(f"{FLAG}: lora_config must be a mapping")
    if other := next((name for name in given if name not in OPERATORS), None):
        raise EngineError(f"{FLAG}: lora_config: {other} is not set here: it follows from --lora-adapters")
    if not room.slots:
        if given:
            raise EngineError(f"{FLAG}: lora_config is for --lora-adapters, which is missing")
        return {}
    for adapter in adapters:
        _check(adapter, MODULES, room.rank)
    changed = frozenset(MODULES.keys() - FUSED if room.takes_others else ())
    changed = changed.union(*(adapter.modules for adapter in adapters))
    if changed.intersection(SPLIT_ATTENTION):
        changed = changed.union(SPLIT_ATTENTION)
    modules = {MODULES[name]: name for name in MODULES if name in changed}
    keywords: dict[str, Any] = {
        "enable_lora": True,
        "lora_config": {
            "lora_target_modules": list(modules),
            "trtllm_modules_to_hf_modules": modules,
            "max_lora_rank": room.rank,
            "max_loras": room.slots,
            "max_cpu_loras": config.lora_limit,
            **given,
        },
    }
    if not _has_graphs():
        if options.get("cuda_graph_config") is not None:
            raise EngineError(
                f"{FLAG}: cuda_graph_config: CUDA graphs of this version of TensorRT-LLM leave LoRA adapters out"
            )
        keywords["cuda_graph_config"] = None
    return keywords


def _check(adapter: LoraAdapter, served: Collection[str], rank: int) -> None:
    problem = None
    if adapter.has_scales:
        problem = "has alpha_pattern, which TensorRT-LLM leaves out"
    elif unknown := sorted(adapter.modules.difference(served)):
        problem = f"changes {unknown[0]}, and TensorRT-LLM serves adapters of {', '.join(served)}"
    elif bases := sorted(filter(None, (change.base for change in adapter.changes.values()))):
        problem = f"has {bases[0]}, and TensorRT-LLM reads no weights of the model from adapters"
    elif adapter.rank > rank:
        problem = f"has rank {adapter.rank}, and --max-lora-rank is {rank}"
    if problem is not None:
        raise EngineError(f"the LoRA adapter {adapter.name} {problem}")


class LoraRequests(dict[str, object]):
    """The LoRARequest, `kind`, of each adapter, by name. The library knows adapters by numbers: none is used twice."""

    def __init__(self, kind: type[Any], lora_config: Mapping[str, Any]) -> None:
        """`lora_config` is that of the engine."""
        super().__init__()
        self._kind, self._config = kind, lora_config
        self._numbers = count(1)

    def add(self, adapter: LoraAdapter) -> None:
        """Add an adapter. Raises EngineError for one that the engine was not built for."""
        _check(adapter, self._config["trtllm_modules_to_hf_modules"].values(), self._config["max_lora_rank"])
        self[adapter.name] = self._kind(adapter.name, next(self._numbers), str(adapter.folder))


def _has_graphs() -> bool:
    try:
        return find_spec(GRAPHS_WITH_ADAPTERS) is not None
    except ImportError:  # one of its parents is missing
        return False
