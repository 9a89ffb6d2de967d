"""The images of deploy/container, built and run by the commands of docs/containers.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from container_images import BASE, ROOT, Podman, download, import_base, require_tools, require_torch_for_cpus, until
from page import commands
from ports import free_port

MODEL = "SmolLM2-135M-Instruct"
KEY = "sk-example"
OLDER = {"llguidance": "0.7.29", "numpy": "1.26.4", "pyyaml": "5.4.1", "torch": "2.9.0a0", "transformers": "4.57.1"}
"""Packages of a stand-in for NVIDIA's image; one is too old for the server."""

Figures = list[tuple[str, str]]


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    require_tools()
    with TemporaryDirectory() as folder:  # pytest removes its own after three other sessions
        podman = Podman(Path(folder))
        import_base(podman)
        yield podman
        podman("podman rm --all --force --time 0; podman volume prune --force")


@pytest.fixture(scope="module")
def router_image(podman: Podman) -> str:
    router, _ = commands("containers.md", "Build")
    podman.build(router, download(["requirements.txt", "requirements-build.txt"]))
    return "text-generation:router"


@pytest.fixture(scope="module")
def cpu_image(podman: Podman, router_image: str) -> str:
    torch = require_torch_for_cpus()
    _, cpu = commands("containers.md", "Build")
    podman.build(cpu, download(["requirements-cpu.txt"], torch))
    return "text-generation:cpu"


@pytest.fixture(scope="module")
def files(podman: Podman, demo_model: Path) -> None:
    """The model, and the secrets by the commands of the page, in the folder where the commands run."""
    shutil.copytree(demo_model, podman.folder / "models" / MODEL)
    for heading in ("Run", "Router and shards apart"):
        for command in commands("containers.md", heading):
            if not command.startswith(("podman", "curl")):
                podman(command)


@pytest.fixture
def here(podman: Podman) -> Iterator[list[str]]:
    """Substitutions for the commands of the page: a free port. Containers are gone afterwards."""
    yield ["127.0.0.1:3000", f"127.0.0.1:{free_port()}"]
    podman("podman rm --force --ignore --time 0 router; podman rm --all --force --time 0")


def post(podman: Podman, port: str, path: str, body: object) -> dict[str, object]:
    sent = f"curl --silent --fail-with-body http://{port}{path} --header 'Authorization: Bearer {KEY}' --json @-"
    answer: dict[str, object] = json.loads(podman(f"{sent} <<'END'\n{json.dumps(body)}\nEND"))
    return answer


def test_the_containerfile_is_clean() -> None:
    hadolint = shutil.which("hadolint", path=str(ROOT / ".cache" / "hadolint" / "bin")) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    subprocess.run([hadolint, ROOT / "deploy" / "container" / "Containerfile"], check=True)


def test_the_router_image_has_no_torch_no_installer_and_no_sources(
    podman: Podman, router_image: str, figures: Figures
) -> None:
    probe = "import importlib.util as u; print([n for n in ('torch', 'pip', 'transformers') if u.find_spec(n)])"
    assert podman(f'podman run --rm --entrypoint python {router_image} -c "{probe}"') == "[]"
    assert podman(f"podman run --rm --entrypoint ls {router_image} -A /source /dist /data", check=False) == "/data:"
    assert "--local-dir" in podman(f"podman run --rm --entrypoint hf {router_image} download --help")
    figures.append(("size of the router image", f"{podman.inspect(router_image)['Size'] / 1e6:.0f} MB"))
    figures.append(("of which the base", f"{podman.inspect(BASE)['Size'] / 1e6:.0f} MB"))


@pytest.mark.parametrize("user", [None, "1000650000:0"], ids=["own-user", "any-user"])
def test_the_cpu_image_serves_without_privileges_and_drains(
    podman: Podman, cpu_image: str, files: None, here: list[str], user: str | None, figures: Figures
) -> None:
    *_, run, health, generate, stop = (command.replace(*here) for command in commands("containers.md", "Run"))
    started = time.monotonic()
    podman(run if user is None else run.replace("podman run ", f"podman run --user {user} "))
    podman(health)
    figures.append((f"ready, user {user or 10001}", f"{time.monotonic() - started:.1f} s"))
    assert json.loads(podman(generate))["generated_text"]
    podman("podman exec text-generation python -c 'import accelerate, transformers'")

    inside = podman("podman exec text-generation cat /proc/1/status")
    status = dict(re.findall(r"^(\w+):\s+(\S+)", inside, re.MULTILINE))
    assert status["Uid"] == (user or "10001:0").partition(":")[0]
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")
    assert podman("podman exec text-generation touch /opt/file /usr/file && echo written", check=False) == ""

    port = here[1]
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    grammar = {"max_new_tokens": 20, "grammar": {"type": "json", "value": schema}}
    answer = post(podman, port, "/generate", {"inputs": "A number:", "parameters": grammar})
    assert json.loads(str(answer["generated_text"])) == {"n": 7}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert post(podman, port, "/v1/chat/completions", chat)["object"] == "chat.completion"

    podman("podman exec --detach text-generation sh -c '(sleep 0.1 &)'")
    until(lambda: " Z " not in processes(podman))

    late: list[dict[str, object]] = []
    body = {"inputs": "Count:", "parameters": {"max_new_tokens": 30, "ignore_eos_token": True, "details": True}}
    request = threading.Thread(target=lambda: late.append(post(podman, port, "/generate", body)))
    request.start()
    until(lambda: "tgi_batch_current_size 1" in metrics(podman, port))
    started = time.monotonic()
    podman(stop)
    figures.append((f"stop during a request, user {user or 10001}", f"{time.monotonic() - started:.1f} s"))
    request.join()
    assert late[0]["details"]["generated_tokens"] == 30  # type: ignore[index]
    assert podman.inspect("text-generation")["State"]["ExitCode"] == 0
    if user is None:
        for command in commands("containers.md", "Upgrade and roll back"):
            podman(command.replace(*here))
        assert podman.inspect("text-generation-1")["State"]["Status"] == "running"
        podman("podman stop --time 120 text-generation-1 && podman rm text-generation-1 text-generation")
    figures.append(("size of the CPU image", f"{podman.inspect(cpu_image)['Size'] / 1e6:.0f} MB"))


def test_router_and_shards_serve_in_containers_of_their_own(
    podman: Podman, cpu_image: str, files: None, here: list[str]
) -> None:
    _, shards, router, health, stop = (
        command.replace(*here) for command in commands("containers.md", "Router and shards apart")
    )
    launcher = "--entrypoint text-generation-launcher text-generation:router --parts router --model-id"
    charts = router.replace("text-generation:router --model-path", launcher)
    assert charts != router
    podman(shards)
    for command in (router, charts):
        podman(f"podman rm --force --ignore router; {command}")
        podman(health)
        assert post(podman, here[1], "/generate", {"inputs": "One, two,", "parameters": {"max_new_tokens": 3}})
    podman(stop)
    assert [podman.inspect(name)["State"]["ExitCode"] for name in ("router", "shards")] == [0, 0]


def test_packages_of_the_base_stay_in_the_image_for_tensorrt_llm(podman: Podman, router_image: str) -> None:
    made = [
        f"metadata=/usr/local/lib/python$(python3 -c 'import sys; print(sys.version[:4])')/dist-packages/{name}-{version}.dist-info"
        f" && mkdir -p $metadata && printf 'Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n' > $metadata/METADATA"
        for name, version in OLDER.items()
    ]
    lines = [f"FROM {BASE}", "RUN apt-get update && apt-get install -y python3", *(f"RUN {line}" for line in made)]
    context = podman.folder / "stand-in"
    context.mkdir()
    (context / "Containerfile").write_text("\n".join(lines), "utf-8")
    podman(f"podman build --tag stand-in {context}")
    (build,) = [command for command in commands("containers.md", "TensorRT-LLM") if command.startswith("podman build")]
    podman.build(re.sub(r"BASE=\S+", "BASE=localhost/stand-in", build), download(["requirements.txt"]))
    own = podman(
        "podman run --rm --entrypoint sh text-generation:tensorrt-llm -c 'ls /opt/text-generation/lib/python3*/site-packages'"
    )
    assert {name for name in OLDER if f"{name}-" in own} == {"pyyaml"}
    assert "aiohttp-" in own


def processes(podman: Podman) -> str:
    """Return the states of all processes of the container."""
    return podman("podman exec text-generation sh -c 'cat /proc/[0-9]*/stat' || true")


def metrics(podman: Podman, port: str) -> str:
    return podman(f"curl --silent http://{port}/metrics --header 'Authorization: Bearer {KEY}'")
