"""The engines, by name. Each is imported only when it is asked for."""

from __future__ import annotations

from importlib.util import find_spec

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError


def build_engine(config: ShardConfig) -> Engine:
    """The engine `config` names. Loads the model; does not warm up. Raises EngineError in one clear line."""
    name = "torch" if config.engine == "auto" else config.engine
    if name == "echo":
        from text_generation_shard.engines.echo import EchoEngine
        from text_generation_shard.engines.echo_self import SelfSchedulingEcho

        return SelfSchedulingEcho.build(config) if config.echo_self_scheduling else EchoEngine.build(config)
    if find_spec("torch") is None:
        raise EngineError("the torch engine needs PyTorch: pip install 'text-generation-trtllm[torch]'")
    from text_generation_shard.engines.torch.engine import TorchEngine

    return TorchEngine.build(config)
