"""What README.md says is so: its flags, its exit codes, its example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from shard_process import shard

from text_generation_launcher.config import LauncherConfig
from text_generation_proto.process import ExitCode

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_flag_of_the_table_is_one_of_the_launcher() -> None:
    flags = re.findall(r"`--([a-z-]+)`", section("Flags").split("Where a default", 1)[0])
    assert len(flags) > 25
    assert {flag.replace("-", "_") for flag in flags} <= LauncherConfig.model_fields.keys()


def test_plain_defaults_of_the_table_are_the_launchers() -> None:
    for names, defaults in re.findall(r"^\| (`--[^|]+) \| ([\d., ]+) \|", section("Flags"), re.MULTILINE):
        fields = [name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", names)]
        written = [value for value in defaults.split(", ") if not value.startswith("0.0.0.0")]
        actual = [LauncherConfig.model_fields[name].default for name in fields if name != "hostname"]
        assert [float(value) for value in written] == actual, names


def test_the_exit_codes_of_the_table_are_all_there_are() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", section("Flags"), re.MULTILINE)]
    assert codes == sorted(ExitCode)


async def test_the_python_example_prints_what_it_says(tmp_path: Path) -> None:
    talking = section("Talking to a shard")
    example = re.search(r"```python\n(.*?)```", talking, re.DOTALL)
    prints = re.search(r"It prints `(.*)`", talking)
    assert example is not None
    assert prints is not None
    address = f"unix://{tmp_path}/shard"
    async with shard(address):
        code = example[1].replace("unix:///tmp/shard", address)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == prints[1]


def test_no_module_is_longer_than_400_lines() -> None:
    folders = ("proto", "router", "shard", "launcher", "scripts", "tests")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
    assert len(modules) > 50
    assert [str(path) for path in modules if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
