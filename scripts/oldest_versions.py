"""Print the oldest versions that pyproject.toml allows, as a constraints file: `make test-oldest` installs them.

Usage: python scripts/oldest_versions.py UV EXTRA,…

Packages that only others need have their newest versions. Ends with exit code 1 if a lower bound cannot be installed together
with the others: it has to be raised.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PINNED = ("torch", "triton")
"""Packages in the version of constraints.txt, torch in its CPU build: a machine's index may offer no older one, and torch asks
for one version of triton."""
NOT_OLDEST = (*PINNED, "huggingface-hub", "tokenizers")
"""Packages whose bounds `make test-oldest` does not reach. The last two have bounds for a server beside TensorRT-LLM, whose
transformers 4 refuses newer ones; the transformers that tests compare with asks for newer ones."""


def main(uv: str, extras: Sequence[str]) -> None:
    """Print the constraints."""
    pinned = [line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line.partition("==")[0] in PINNED]
    arguments = (
        "pip compile --quiet --no-config --no-header --no-annotate --python-version 3.11 --resolution lowest-direct"
    )
    command = [uv, *arguments.split(), *(f"--extra={extra}" for extra in extras), "--overrides=-", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(pinned), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    versions = {name: Version(version) for name, _, version in (line.partition("==") for line in done.stdout.split())}
    raised = [name for name, bound in lower_bounds(extras) if not is_oldest(versions[name], bound)]
    if wrong := sorted(set(raised).difference(NOT_OLDEST)):
        sys.exit(f"raise these bounds in pyproject.toml: {', '.join(f'{name}>={versions[name]}' for name in wrong)}")


def lower_bounds(extras: Sequence[str]) -> list[tuple[str, Version]]:
    """Return the names and lower bounds of the packages that the server and the extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    bounds = [(one.name, limit) for one in map(Requirement, listed) for limit in one.specifier]
    return [(name, Version(limit.version)) for name, limit in bounds if limit.operator == ">="]


def is_oldest(version: Version, bound: Version) -> bool:
    """Return True if a version is the bound, or the first release of the series that the bound names."""
    return version.release[: len(bound.release)] == bound.release


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
