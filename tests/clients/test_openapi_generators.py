"""Clients that four generators make from the OpenAPI document: they compile, and they chat and read a stream."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from client_environments import CACHE, Environment, run
from client_server import ANSWER, QUESTION, Server

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.full, pytest.mark.timeout(900)]

CHECKS = Path(__file__).parent / "generated"
PYTHON = Environment(
    "openapi_generators",
    [
        *("openapi-generator-cli==7.26.0", "openapi-python-client==0.29.1", "datamodel-code-generator==0.89.0"),
        *("httpx==0.28.1", "pydantic==2.14.3", "python-dateutil==4.0.0", "urllib3==2.8.0"),
    ],
)
TYPESCRIPT = ("typescript@5.9.3", "@types/node@24.10.1")


@pytest.fixture(scope="module")
def commands() -> Path:
    """Folder of the generators' commands."""
    return PYTHON.installed()


@pytest.fixture
def document(server: Server, tmp_path: Path) -> Path:
    """The server's document in a file."""
    path = tmp_path / "openapi.json"
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        path.write_bytes(answer.read())
    return path


def generate(commands: Path, document: Path, language: str, folder: Path) -> None:
    """Run openapi-generator."""
    if shutil.which("java") is None:
        pytest.skip("java is not installed")
    command = (commands / "openapi-generator-cli", "generate", "-i", document, "-g", language, "-o", folder)
    # The package's command looks for Java itself, in JAVA_HOME or on the path.
    run(*command, cwd=document.parent, PATH=f"{commands}{os.pathsep}{os.environ['PATH']}")


def check(command: Sequence[str | Path], server: Server, cwd: Path) -> None:
    """Run a check: it prints the answer of a chat, then that of a stream."""
    assert run(*command, server.url, QUESTION, cwd=cwd).splitlines() == [ANSWER, ANSWER]


def test_openapi_generator_in_python(server: Server, commands: Path, document: Path, tmp_path: Path) -> None:
    generate(commands, document, "python", tmp_path / "client")
    run(commands / "python", "-m", "compileall", "-q", "client/openapi_client", cwd=tmp_path)
    check([commands / "python", CHECKS / "openapi_generator.py", tmp_path / "client"], server, tmp_path)


def test_openapi_generator_in_typescript(server: Server, commands: Path, document: Path, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    home = CACHE / "clients" / "typescript"
    home.mkdir(parents=True, exist_ok=True)
    run(npm, "install", "--prefix", home, "--no-audit", "--no-fund", "--no-save", *TYPESCRIPT, cwd=home)
    generate(commands, document, "typescript-fetch", tmp_path / "client")
    shutil.copy(CHECKS / "check.ts", tmp_path)
    types = ("--typeRoots", home / "node_modules" / "@types", "--types", "node")
    target = ("--strict", "--target", "es2022", "--module", "commonjs", "--moduleResolution", "node", "--outDir", "out")
    run(node, home / "node_modules" / "typescript" / "bin" / "tsc", *target, *types, "check.ts", cwd=tmp_path)
    check([node, tmp_path / "out" / "check.js"], server, tmp_path)


def test_openapi_python_client(server: Server, commands: Path, document: Path, tmp_path: Path) -> None:
    generator = (commands / "openapi-python-client", "generate", "--path", document, "--output-path", "client")
    printed = run(*generator, cwd=tmp_path, PATH=f"{commands}:{os.environ['PATH']}")
    assert "arning" not in printed, printed
    run(commands / "python", "-m", "compileall", "-q", "client", cwd=tmp_path)
    check([commands / "python", CHECKS / "openapi_python_client.py", tmp_path / "client"], server, tmp_path)


def test_datamodel_code_generator(server: Server, commands: Path, document: Path, tmp_path: Path) -> None:
    output = ("--output", "models.py", "--output-model-type", "pydantic_v2.BaseModel")
    run(commands / "datamodel-codegen", "--input", document, "--input-file-type", "openapi", *output, cwd=tmp_path)
    check([commands / "python", CHECKS / "datamodel.py", tmp_path], server, tmp_path)
