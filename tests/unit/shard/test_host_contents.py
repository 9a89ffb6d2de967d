"""Shards share the blocks of a host cache only if their engines have the same weights and settings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checked_echo import CheckedEcho
from host_ledger import HostBlocks
from shard_server import serve_engine

from text_generation_shard.config import ShardConfig
from text_generation_shard.host_contents import host_contents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model", "adapter", "other"):
        (tmp_path / name).mkdir()
    for path in ("model/config.json", "model/a.safetensors", "adapter/adapter_model.safetensors"):
        (tmp_path / path).write_bytes(b"1234")
    return tmp_path


def config(folder: Path, **settings: object) -> ShardConfig:
    adapters = f"sql={folder / 'adapter'}"
    return ShardConfig.of(
        **{"model_path": str(folder / "model"), "lora_adapters": adapters, "host_cache_name": "memory-0", **settings}
    )


def rewrite(path: Path) -> None:
    """Write other bytes, and let size and time of modification be the same."""
    before = path.stat()
    path.write_bytes(b"4321")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Put a copy of the file in its place, with the same times, as rsync does."""
    shutil.copy2(path, copy := path.with_name("copy"))
    copy.rename(path)


@pytest.mark.parametrize("file", ["model/config.json", "model/a.safetensors", "adapter/adapter_model.safetensors"])
@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink])
def test_other_files_are_other_contents(folder: Path, file: str, change: Callable[[Path], None]) -> None:
    before = host_contents(config(folder))
    change(folder / file)
    assert host_contents(config(folder)) != before


def test_a_file_behind_a_link_is_known_by_what_it_links_to(folder: Path) -> None:
    (folder / "model/b.safetensors").symlink_to(blob := folder / "other/blob")
    blob.write_bytes(b"1234")
    before = host_contents(config(folder))
    rewrite(blob)
    assert host_contents(config(folder)) != before


@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "fp8_e4m3fn"}, {"quantize": "fp8"}, {"dtype": "float16"}, {"lora_adapters": ""}]
)
def test_other_settings_of_the_model_are_other_contents(folder: Path, settings: dict[str, object]) -> None:
    assert host_contents(config(folder, **settings)) != host_contents(config(folder))


def test_replicas_of_a_memory_share_its_contents(folder: Path) -> None:
    name = host_contents(config(folder))
    assert name.startswith("memory-0/")
    assert host_contents(config(folder, replica=1, address="unix:///other", num_threads=3)) == name
    assert not host_contents(config(folder, host_cache_name=""))


async def test_files_that_change_while_they_are_loaded_are_no_contents(folder: Path) -> None:
    engine = CheckedEcho.build(config(folder, engine="echo"), host=HostBlocks(4))
    for change, contents in ((None, host_contents(config(folder))), (rewrite, "")):
        async with serve_engine(engine, f"unix://{folder}/s", config=config(folder)) as shard:
            if change is not None:
                change(folder / "model/a.safetensors")
            assert (await shard.client.warm_up()).host_cache == contents
