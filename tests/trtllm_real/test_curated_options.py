"""Each option file that NVIDIA publishes with the release starts, or is refused with one message that names every key."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from self_driver import SelfDriver
from standin import model_folder
from trtllm_engines import Engines

from text_generation_shard.engine import EngineError

FILES = sorted(Path(os.environ["TRTLLM_REAL_SOURCE"], "examples", "configs", "curated").glob("*.yaml"))


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "lookup"], ids=lambda file: file.stem)
def test_each_file_starts_or_names_every_key(built: Engines, tmp_path: Path, file: Path) -> None:
    options = yaml.safe_load(file.read_text())
    folder = model_folder(tmp_path / "large", max_position_embeddings=131072)
    given = {"num_shard": _gpus(options), "folder": folder}
    try:
        engine = built(options=str(file), **given)
    except EngineError as error:
        print(f"{file.stem}: {error}")
        for keys in re.findall(r"(?:no option|no field) '(\w+)'|\.(\w+): Input", str(error)):
            _remove(options, keys[0] or keys[1])
        trimmed = tmp_path / "trimmed.yaml"
        trimmed.write_text(yaml.safe_dump(options))
        engine = built(options=str(trimmed), **given)  # nothing else is refused
    driver = SelfDriver(engine)
    stream = driver.admit((5, 6, 7), 3)
    driver.run()
    assert stream.tokens == [5, 6, 7]


def _gpus(options: dict[str, int]) -> int:
    return options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)


def _remove(options: dict[str, object], key: str) -> None:
    options.pop(key, None)
    for value in options.values():
        if isinstance(value, dict):
            value.pop(key, None)
