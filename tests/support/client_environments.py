"""Environments of clients, each with a pinned version, in .cache/clients."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache"
UV = CACHE / "uv" / "bin" / "uv"


def run(*command: object, cwd: Path | None = None, **environ: str) -> str:
    """Run a command that must succeed; return its standard output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"DO_NOT_TRACK": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """The packages of an environment."""

    name: str
    pins: Sequence[str]
    python: str = sys.executable
    without: Sequence[str] = ()
    """Packages that the others require, left out: those of the project's own environment are used."""

    def installed(self) -> Path:
        """Install the packages, unless they are; return the folder of their commands. Skip the test where that fails."""
        folder = CACHE / "clients" / self.name
        stamp, digest = folder / "pins", hashlib.sha256(repr(self).encode()).hexdigest()
        if not stamp.is_file() or stamp.read_text() != digest:
            if not UV.is_file():
                pytest.skip("uv is not installed: `make uv`")
            self._run("venv", "--clear", "--no-python-downloads", "--python", self.python, str(folder))
            overrides = folder / "overrides"
            overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in self.without))
            python = str(folder / "bin" / "python")
            self._run("pip", "install", "--python", python, "--overrides", str(overrides), *self.pins)
            if self.without:
                (packages,) = folder.glob("lib/python*/site-packages")
                (packages / "zz_project.pth").write_text(sysconfig.get_path("purelib"))
            stamp.write_text(digest)
        return folder / "bin"

    def _run(self, *args: str) -> None:
        command = [str(UV), "--cache-dir", str(CACHE / "uv" / "cache"), *args]
        pythons = [os.environ["PATH"], *map(str, (Path.home() / ".pyenv" / "versions").glob("*/bin"))]
        environ = os.environ | {"PATH": os.pathsep.join(pythons)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"the environment of {self.name} cannot be installed: {done.stderr.strip()}")


def npm_installed(package: str, command: str) -> Path:
    """Install an npm package, `name@version`, unless it is; return its command. Skip the test where that fails."""
    folder = CACHE / "clients" / f"npm-{command}"
    stamp, path = folder / "pins", folder / "node_modules" / ".bin" / command
    if not stamp.is_file() or stamp.read_text() != package:
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", package]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
        # Some packages are a binary that npm installs beside them, or that their script downloads.
        if (
            done.returncode
            or subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode
        ):
            pytest.skip(f"{package} cannot be installed: {done.stderr.strip() or 'its command does not start'}")
        stamp.write_text(package)
    return path
