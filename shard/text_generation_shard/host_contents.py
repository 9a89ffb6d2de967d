"""The name of the contents of a host cache: shards share blocks only if they compute the same from the same tokens.

The memory outlives shards, and the files of the model may change meanwhile. They are known by their metadata, as that takes no time
to read: a change of a file changes its ctime, which no program can set.
"""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from text_generation_common.lora import parse_adapters
from text_generation_common.settings import Topic
from text_generation_shard.config import ShardConfig, ShardSettings


def host_contents(config: ShardConfig) -> str:
    """Return the name, which begins with that of the memory; "" without a host cache."""
    if not config.host_cache_name:
        return ""
    settings = config.model_dump(include=set(ShardSettings.topics[Topic.MODEL].split()))
    folders = [config.model_path, *(each.source for each in parse_adapters(config.lora_adapters))]
    folders += [config.speculator] if config.speculator else []
    known = settings, [sorted(_files(Path(folder))) for folder in folders]
    return f"{config.host_cache_name}/{blake2b(repr(known).encode(), digest_size=8).hexdigest()}"


def _files(folder: Path) -> Iterator[tuple[str, int, int, int, int]]:
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            yield str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns
