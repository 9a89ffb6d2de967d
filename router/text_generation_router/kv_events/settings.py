"""KvEventsConfig: the value of --kv-events-config."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError


class KvEventsConfig(BaseModel):
    """The keys of vLLM's flag of the same name, but for the queue that is not needed here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: PositiveInt = 10_000
    """Batches that are kept for subscribers that ask for them again."""
    hwm: PositiveInt = 100_000
    """Batches that wait for a slow subscriber."""
    topic: str = ""

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return what a flag says; None if there are no events. Raises ValueError."""
        try:
            config = cls.model_validate_json(text) if text else None
        except ValidationError as error:
            raise ValueError(f"`kv_events_config`: {error.errors()[0]['msg']}: {error.errors()[0]['loc']}") from None
        if config is None or not config.enable_kv_cache_events:
            return None
        if None in (find_spec("zmq"), find_spec("msgspec")):
            raise ValueError("`kv_events_config` needs the extra `kv-events`: pip install 'pyzmq>=26' 'msgspec>=0.19'")
        return config
