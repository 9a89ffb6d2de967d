"""Render the Helm chart, and check the objects against the schemas of Kubernetes and of custom resources.

`make helm-tools` installs helm, the schemas and the models in .cache/helm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from text_generation_launcher.config import LauncherConfig, read_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "text-generation"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
HUB = ("--set", "model.hub=org/model")
TOOLS = ROOT / ".cache" / "helm"
SCHEMAS = TOOLS / "python" / "kubernetes_validate" / "kubernetes-json-schema"
CRDS = Path(__file__).parent / "crds"
OWN_SCHEMAS: dict[str, Any] = json.loads((CRDS / "schemas.json").read_text(encoding="utf-8"))
"""Minimal schemas of resources without a package, by kind."""

MINORS = ("1.30", "1.33", "1.35", "1.37")
"""1.30: the oldest that the chart supports. 1.33: image volumes in beta, off by default. 1.35: the release of the kubectl
under test. 1.37: the newest schemas."""

Object = dict[str, Any]

needs_helm = pytest.mark.skipif(not (TOOLS / ".installed").exists(), reason="helm is not installed: make helm-tools")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a rendered object that runs the launcher."""

    owner: str
    """Kind and name of the object."""
    part: str
    """cell, router, shards or workers."""
    spec: Object

    @property
    def container(self) -> Object:
        return self.spec["containers"][0]

    @property
    def args(self) -> list[str]:
        return self.container["args"]


def helm(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm; without access to a cluster or to files of the user."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(TOOLS)}
    command = [str(TOOLS / "layer" / "helm" / "helm"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ, cwd=ROOT)


def render(*args: str | Path, minor: str = MINORS[-1], release: str = "demo") -> list[Object]:
    """Return the objects of a release. Raises AssertionError with helm's message."""
    done = helm("template", release, CHART, "--namespace", "llm", "--kube-version", minor, *args)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@cache
def example(path: Path) -> list[Object]:
    """Return the objects of an example."""
    return render("-f", path)


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    """Return the pods that run the launcher."""
    for thing in objects:
        spec, owner = thing.get("spec", {}), f"{thing['kind']} {thing['metadata']['name']}"
        match thing["kind"]:
            case "Deployment":
                templates = [spec["template"]]
            case "LeaderWorkerSet":
                templates = [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
            case "LLMInferenceService":
                templates = [{"spec": spec["template"]}]
            case "ServingRuntime":
                templates = [{"spec": spec}]
            case _:
                continue
        for template in templates:
            labels = template.get("metadata", {}).get("labels", {})
            yield Pod(owner, labels.get("app.kubernetes.io/component", "cell"), template["spec"])


def parsed(pod: Pod) -> LauncherConfig:
    """Return the settings of a pod, by the launcher's own parser."""
    args = [arg.replace("$(POD_IP)", "10.0.0.7") for arg in pod.args]
    args = ["--shard-token=t" if arg.startswith("--shard-token-file=") else arg for arg in args]
    group = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "demo-0.demo.llm"}
    return read_config(args, group if pod.owner.startswith("LeaderWorkerSet") else {})


def set_args(values: Mapping[str, object]) -> list[str]:
    """Return the arguments that set these values, by their dotted names."""
    return [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]


@cache
def _folder(minor: str) -> Path:
    return SCHEMAS / f"v{minor}.0-local-strict"


@cache
def _registry(minor: str) -> Registry[Any]:
    definitions = json.loads((_folder(minor) / "_definitions.json").read_text(encoding="utf-8"))
    return Registry().with_resource(definitions["$id"], Resource.from_contents(definitions))


@cache
def _validator(minor: str, kind: str, version: str) -> jsonschema.Draft202012Validator | None:
    """Return the validator of a kind; None if neither Kubernetes nor this folder has its schema."""
    if kind in OWN_SCHEMAS:
        schema = OWN_SCHEMAS[kind] | {"$id": f"https://kubernetes.io/api/{kind.lower()}"}
    else:
        group, _, number = version.rpartition("/")
        name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
        file = _folder(minor) / f"{name}.json"
        if not file.exists():
            return None
        schema = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema, registry=_registry(minor))


def problems(objects: Sequence[Object], minor: str) -> list[str]:
    """Return the fields that are wrong or unknown, by the schemas of a Kubernetes minor and those of this folder."""
    return [
        f"{thing['kind']} {thing['metadata']['name']}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for thing in objects
        if (validator := _validator(minor, thing["kind"], thing["apiVersion"])) is not None
        for error in validator.iter_errors(thing)
    ]


def custom_problems(objects: Sequence[Object]) -> tuple[set[str], list[str]]:
    """Return the kinds that no schema of `problems` has, and what their models find wrong or unknown."""
    custom = [thing for thing in objects if _validator(MINORS[-1], thing["kind"], thing["apiVersion"]) is None]
    shutil.copy(CRDS / "check.mjs", TOOLS)
    done = subprocess.run(
        ["node", "check.mjs"],
        input=json.dumps(custom),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=TOOLS,
    )
    assert done.returncode == 0, done.stderr
    return {thing["kind"] for thing in custom}, done.stdout.splitlines()
