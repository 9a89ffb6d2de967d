"""Bring the Python folders of a release of TensorRT-LLM, and its published option files, into .cache; print the folder.

TRTLLM_SOURCE: a folder with them, such as a checkout or an installed package's parent; `pip`: from the wheel, of which pip loads all
2.5 GB. Without it: git, a sparse clone of the tag without history (a few MB). Nothing is printed if they cannot be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = "https://github.com/NVIDIA/TensorRT-LLM"
FOLDERS = ("tensorrt_llm", "examples/configs/curated")
CACHE = Path(".cache/trtllm/sources")
TIMEOUT_S = 600


def main() -> None:
    """Print the folder of the sources of the tag that the command line names."""
    tag, given = sys.argv[1], os.environ.get("TRTLLM_SOURCE", "")
    into = CACHE / tag
    if given not in ("", "pip"):
        into = Path(given)
    elif not (into / FOLDERS[0]).is_dir():
        try:
            (by_pip if given == "pip" else by_git)(tag, into)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"fetch: {tag} cannot be had: {error}", file=sys.stderr)
            return
    if (into / FOLDERS[0] / "executor").is_dir():
        print(into.resolve())
    else:
        print(f"fetch: {into} has no folder tensorrt_llm/executor", file=sys.stderr)


def by_git(tag: str, into: Path) -> None:
    """Clone the folders of a tag. Raises OSError or SubprocessError."""
    run = ["git", "-C", str(into)]
    clone = ["clone", "--depth", "1", "--filter=blob:none", "--sparse", "--branch", tag, REPOSITORY, str(into)]
    environment = {**os.environ, "GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}
    for command in (["git", *clone], [*run, "sparse-checkout", "set", *FOLDERS]):
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=TIMEOUT_S)


def by_pip(tag: str, into: Path) -> None:
    """Take the folders out of a wheel. Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"tensorrt_llm=={tag.removeprefix('v')}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--pre", "--dest", folder, name]
        subprocess.run(command, stdout=sys.stderr, check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [
                    each for each in archive.namelist() if each.startswith("tensorrt_llm/") and each.endswith(".py")
                ]
                archive.extractall(into, names)


if __name__ == "__main__":
    main()
