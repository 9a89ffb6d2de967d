"""deploy/container/requirements*.txt against pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy" / "container").glob("requirements*.txt"))
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
CONSTRAINTS = {
    canonicalize_name(name): version for name, version in PINNED.findall((ROOT / "constraints.txt").read_text("utf-8"))
}
CONTAINERFILE = (ROOT / "deploy" / "container" / "Containerfile").read_text("utf-8")
INSTALL = re.compile(r"pip install((?: '[^']+')+)")
"""The packages of a command in the text of an error."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def locked(file: Path) -> dict[str, str]:
    """Return the packages of a file and their versions; nothing else may be in it."""
    text = file.read_text(encoding="utf-8")
    entry = re.compile(
        r"^[\w.-]+==\S+ \\\n(?:    --hash=sha256:[0-9a-f]{64} \\\n)*    --hash=sha256:[0-9a-f]{64}\n", re.MULTILINE
    )
    assert re.sub(r"^#.*\n", "", entry.sub("", text), flags=re.MULTILINE) == ""
    return {canonicalize_name(name): version for name, version in PINNED.findall(text)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_locked_versions_are_those_of_the_constraints(file: Path) -> None:
    packages = locked(file)
    assert {name: version for name, version in packages.items() if CONSTRAINTS.get(name, version) != version} == {}
    if file.stem in ("requirements", "requirements-cpu"):
        assert packages.keys() <= CONSTRAINTS.keys()


def test_every_package_that_the_server_needs_is_locked() -> None:
    packages, found = locked(ROOT / "deploy" / "container" / "requirements.txt"), set()
    extras = PROJECT["optional-dependencies"]
    left: list[Iterable[str]] = [[*PROJECT["dependencies"], *extras["otlp"], *extras["kv-events"]]]
    while left:
        for required in map(Requirement, left.pop()):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                name = canonicalize_name(required.name)
                left += [] if name in found else [requires(name) or ()]
                found.add(name)
                assert required.specifier.contains(packages[name]), "run: make lock"
    assert found == packages.keys()


def test_the_images_have_the_optional_packages_of_their_engine() -> None:
    folder, extras = ROOT / "deploy" / "container", PROJECT["optional-dependencies"]
    cpu, cuda = (
        {**locked(folder / "requirements.txt"), **locked(folder / f"requirements-{name}.txt")}
        for name in ("cpu", "cuda")
    )
    everywhere = {*extras["torch"], *extras["transformers"]}
    # pip refuses a list with hashes if a package of it needs one that is not in it, which torch is for CPUs.
    assert "--no-deps --require-hashes -r deploy/container/requirements-cpu.txt" in CONTAINERFILE
    for packages, wanted in ((cpu, everywhere), (cuda, everywhere.union(extras["cuda"], extras["humming"]))):
        for required in map(Requirement, wanted):
            if packages is cuda or required.name != "torch":
                assert required.specifier.contains(packages[canonicalize_name(required.name)]), "run: make lock"


def test_error_texts_and_pages_name_packages_that_exist() -> None:
    """The name of this project is not registered: anyone could do it, and be installed."""
    known = {requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra}
    found = set()
    for folder in ("proto", "router", "shard", "launcher", "bench"):
        for file in (ROOT / folder).rglob("*.py"):
            for command in INSTALL.findall(file.read_text("utf-8")):
                found.update(re.findall(r"'([^']+)'", command))
    assert found
    assert found <= known
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if f"{PROJECT['name']}[" in page.read_text("utf-8")] == []


def test_the_images_have_the_torch_of_the_constraints() -> None:
    assert f"ARG TORCH=torch=={CONSTRAINTS['torch']}\n" in CONTAINERFILE
