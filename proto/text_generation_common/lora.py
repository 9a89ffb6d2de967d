"""The names and sources of LoRA adapters, as `--lora-adapters` gives them.

TGI's grammar: `id`, `id=path`, `id@revision` or `id=path@revision`, with commas between. Without a path the id is also that of
the adapter on the Hugging Face hub.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"(?P<name>[^=@]+)(=(?P<source>[^=@]+))?(@(?P<revision>[^=@]+))?")
MAX_NAME_LENGTH = 256
"""Characters of a name."""
MODEL_NAMES = frozenset({"tgi", "dummy", "default", "model"})
"""Names that clients give to the model where a server has one: TGI's clients, huggingface_hub, SGLang's and other examples."""
MAX_ADAPTERS = 1024
"""Adapters of one shard."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One adapter: the name in requests, and the folder or the id on the hub that it is loaded from."""

    name: str
    source: str
    revision: str = ""
    """Branch, tag or commit on the hub; "": the default."""


def is_adapter_name(name: str) -> bool:
    fits = name.isprintable() and name == name.strip() and 0 < len(name) <= MAX_NAME_LENGTH
    return fits and not set(name) & set(",=@")


def parse_adapters(text: str) -> tuple[AdapterSource, ...]:
    """Return the adapters of a setting. Raises ValueError."""
    adapters: dict[str, AdapterSource] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ValueError(f"Invalid LoRA adapter format: {entry}")
        name, source, revision = ((part or "").strip() for part in found.group("name", "source", "revision"))
        if not is_adapter_name(name):
            raise ValueError(f"invalid LoRA adapter name {name[:MAX_NAME_LENGTH]!r}")
        if name in MODEL_NAMES:
            raise ValueError(f"the LoRA adapter name {name} is a name of the model itself")
        if name in adapters:
            raise ValueError(f"duplicate LoRA adapter {name}")
        adapters[name] = AdapterSource(name, source or name, revision)
    if len(adapters) > MAX_ADAPTERS:
        raise ValueError(f"{len(adapters)} LoRA adapters are more than {MAX_ADAPTERS}")
    return tuple(adapters.values())


def adapters_to_text(adapters: Sequence[AdapterSource]) -> str:
    """Return the setting for adapters in local folders."""
    return ",".join(f"{adapter.name}={adapter.source}" for adapter in adapters)
