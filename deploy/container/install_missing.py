"""Install a wheel and those of its requirements that an environment lacks, in locked versions.

Usage: PYTHON-WITH-PIP install_missing.py PYTHON-OF-ENVIRONMENT WHEEL LOCK

NVIDIA's image contains many of the packages that the server needs. They stay as they are if the server works with their
versions; others are installed beside them, in the environment, which takes precedence.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename


def main(python: str, wheel: str, lock: str) -> None:
    """Install the wheel, then what it lacks, until nothing is missing."""
    pip(python, "install", "--no-deps", wheel)
    lines = {
        canonicalize_name(found[1]): found[0]
        for found in re.finditer(r"^([\w.-]+)==.*\n(?:    --hash=.*\n)+", Path(lock).read_text("utf-8"), re.MULTILINE)
    }
    ours = {parse_wheel_filename(Path(wheel).name)[0]}
    while names := missing(python, ours):
        if unknown := names - lines.keys() | names & ours:
            sys.exit(f"not in {lock}, or not in a version that suffices: {', '.join(sorted(unknown))}")
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as chosen:
            chosen.writelines(lines[name] for name in names)
            chosen.flush()
            pip(python, "install", "--no-deps", "--require-hashes", "-r", chosen.name)
        ours |= names


def missing(python: str, ours: set[str]) -> set[str]:
    """Return the requirements of our packages that are not installed, or in a version that does not suffice."""
    report = json.loads(pip(python, "inspect"))
    installed = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in report["installed"]}
    required = [Requirement(text) for name in ours for text in installed[name].get("requires_dist", ())]
    return {
        name
        for one in required
        if one.marker is None or one.marker.evaluate({**report["environment"], "extra": ""})
        if (name := canonicalize_name(one.name)) not in installed
        or not one.specifier.contains(installed[name]["version"], prereleases=True)
    }


def pip(python: str, *arguments: str) -> str:
    """Run pip for another environment and return its output."""
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
