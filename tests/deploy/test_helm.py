"""The Helm chart: every example is valid, knows its flags, stops in time, and never leaves zero replicas."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import (
    CHART,
    EXAMPLES,
    HUB,
    MINORS,
    ROOT,
    TOOLS,
    custom_problems,
    example,
    helm,
    needs_helm,
    parsed,
    pods,
    problems,
    render,
    set_args,
)

pytestmark = needs_helm

SINCE = {"oci.yaml": "1.33"}
"""Examples that need a newer Kubernetes."""
TIMEOUTS = {
    "cell": ("shutdown_delay", "graceful_termination_timeout", "drain_timeout", "shutdown_timeout"),
    "router": ("shutdown_delay", "graceful_termination_timeout"),
    "shards": ("drain_timeout", "shutdown_timeout"),
    "workers": ("drain_timeout", "shutdown_timeout"),
}
"""Settings that a part spends one after the other when it stops."""
PAGE = ROOT / "docs" / "kubernetes.md"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_for_every_minor(path: Path) -> None:
    lint = helm("lint", "--strict", CHART, "-f", path)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    for minor in MINORS:
        if minor < SINCE.get(path.name, ""):
            refused = helm("template", CHART, "--kube-version", minor, "-f", path)
            assert f"needs Kubernetes {SINCE[path.name]}, not v{minor}" in refused.stderr
            continue
        assert problems(render("-f", path, minor=minor), minor) == []


def test_custom_resources_are_valid() -> None:
    objects = [thing for path in EXAMPLES for thing in example(path)]
    objects += render(*HUB, "--set", "shape=split,tls.secret=certificates,autoscaling.enabled=true")
    checked, found = custom_problems(objects)
    assert found == []
    assert checked == {"Certificate", "HTTPRoute", "Issuer", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_server_knows_every_flag_and_stops_within_the_grace_period(path: Path) -> None:
    for pod in pods(example(path)):
        config = parsed(pod)
        assert pod.container["command"] == ["text-generation-launcher"]
        if pod.owner.startswith("ServingRuntime"):
            continue  # it has no grace period
        spent = sum(getattr(config, name) for name in TIMEOUTS[pod.part])
        assert pod.spec["terminationGracePeriodSeconds"] >= spent + 10, pod.owner
        assert config.shutdown_delay >= 5, "an endpoint is removed while requests are still accepted"


@pytest.mark.parametrize("shape", ["cell", "split", "group"])
def test_values_of_every_type_reach_the_server(shape: str) -> None:
    flags = {
        "cors-allow-origin": ["http://a", "http://b"],
        "max-queued-tokens": 2000000,
        "hang-timeout": 2.5,
        "prefix-caching": False,
        "max-total-tokens": None,
        "chat-template": '{% for m in messages %}"{{ m }}"\n{% endfor %}',
    }
    pod_values = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "volumes": [{"name": "extra", "emptyDir": {}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "initContainers": [{"name": "first", "image": "busybox"}],
        "sidecars": [{"name": "beside", "image": "busybox"}],
        "resourceClaims": [{"name": "gpu"}],
        "resources": {"claims": [{"name": "gpu"}]},
        "imagePullSecrets": [{"name": "registry"}],
        "networkPolicy": {"clients": [{"podSelector": {}}]},
    }
    values = {"flags": flags, "shape": shape, "secrets": {"shardToken": {"secret": "token"}}} | pod_values
    objects = render(*HUB, *set_args(values))
    assert [problems(objects, minor) for minor in MINORS] == [[]] * len(MINORS)
    for config in map(parsed, pods(objects)):
        assert config.cors_allow_origin == ("http://a", "http://b")
        assert (config.max_queued_tokens, config.hang_timeout, config.prefix_caching) == (2000000, 2.5, False)
        assert (config.max_total_tokens, config.chat_template) == (None, flags["chat-template"])


@pytest.mark.parametrize("shape", ["cell", "split"])
@pytest.mark.parametrize(
    "flags",
    [
        {"graceful-termination-timeout": 600, "drain-timeout": 0},
        {"graceful-termination-timeout": None, "shutdown-timeout": None, "drain-timeout": 0.5},
        {"shutdown-delay": 1000000},
    ],
    ids=str,
)
def test_the_grace_period_follows_the_flags(shape: str, flags: dict[str, float | None]) -> None:
    args = ["--set-json", f"flags={json.dumps(flags)}"]
    for pod in pods(render(*HUB, "--set", f"shape={shape}", *args)):
        spent = sum(getattr(parsed(pod), name) for name in TIMEOUTS[pod.part])
        assert spent < pod.spec["terminationGracePeriodSeconds"] <= spent + 30


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("replcias=2", "replcias"),
        ("image.tga=1", "tga"),
        ("model.cache.sise=1Gi", "sise"),
        ("shape=cluster", "shape"),
        ("replicas=two", "replicas"),
        ("ports.http=70000", "http"),
        ("autoscaling.busyRatio=3", "busyRatio"),
        ("resources.limit.cpu=1", "limit"),
        ("flags.max-concurent-requests=8", "max-concurent-requests"),
        ("flags.max-concurrent-requests=many", "max-concurrent-requests"),
        ("flags.port=80", "port"),
        ("router.flags.dispatch=nearest", "dispatch"),
        ("shape=group", "secrets.shardToken"),
        ("model.claim=models", "one of model.hub, model.claim and model.oci"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=9", "minReplicas is more than"),
        ("shape=split,router.replicas=3", "a router without a shard"),
        ("shape=split,flags.num-replicas=2", "flags.num-replicas is for the shape cell"),
        ("shape=split,flags.num-shard=2,ports.health=50050", "these overlap"),
        ("shape=group,secrets.shardToken.secret=t,flags.num-shard=16,ports.health=50058", "these overlap"),
        ("ports.http=8081", "ports.http and ports.management are both 8081"),
        ("updateStrategy.maxSurge=0,updateStrategy.maxUnavailable=0%", "no pod is ever replaced"),
        (r"podLabels.app\.kubernetes\.io/component=x", "selects the pods"),
        ("ingress.enabled=true", "ingress.hosts"),
        ("model.cache.create=true,model.cache.claim=models", "`claim` names one that exists"),
        ("gateway.pool.enabled=true", "endpointPicker.name"),
        ("gateway.route.enabled=true", "parentRefs"),
        ("kserve.kind=LLMInferenceService", "kserve.modelUri"),
        ("shape=split,kserve.kind=ServingRuntime", "set shape to cell"),
    ],
)
def test_wrong_values_are_refused_by_name(value: str, message: str) -> None:
    refused = helm("template", CHART, *HUB, "--set", value)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_the_schemas_find_unknown_fields() -> None:
    """The validation itself: a wrong field of each kind of schema is found."""
    objects = render("-f", CHART / "examples" / "several-hosts.yaml", "--set", "autoscaling.enabled=true")
    wrong = {thing["kind"]: thing for thing in objects}
    wrong["Deployment"]["spec"]["replcias"] = 1
    wrong["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["imagee"] = ""
    wrong["ScaledObject"]["spec"]["triggers"][0]["treshold"] = "1"
    wrong["Certificate"]["spec"]["secretName"] = 5
    found = "\n".join(problems(list(wrong.values()), "1.35") + custom_problems(list(wrong.values()))[1])
    assert all(name in found for name in ("replcias", "imagee", "treshold", "secretName")), found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_pods_have_no_privileges_no_tokens_and_no_secrets(path: Path) -> None:
    objects = example(path)
    specs = [(pod.owner, pod.part, pod.spec) for pod in pods(objects)]
    specs += [(thing["kind"], "test", thing["spec"]) for thing in objects if thing["kind"] == "Pod"]
    discovers = any(arg.startswith("--shards=kubernetes:") for pod in pods(objects) for arg in pod.args)
    for owner, part, spec in specs:
        container = spec["containers"][0]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("secretKeyRef" in str(variable) for variable in container.get("env", []))
        if not owner.startswith("ServingRuntime"):
            security = spec["securityContext"]
            assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["automountServiceAccountToken"] is (part == "router" and discovers)
    rules = [rule for thing in objects if thing["kind"] == "Role" for rule in thing["rules"]]
    wanted = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert rules == ([wanted] if discovers else [])


@pytest.mark.parametrize("shape", ["split", "group"])
@pytest.mark.parametrize(("tag", "changed"), [("image.tag", {"shards", "workers"}), ("router.image.tag", {"router"})])
def test_one_tag_changes_only_its_pods(shape: str, tag: str, changed: set[str]) -> None:
    """Two upgrades in an order are possible: a pod whose template is unchanged stays."""
    flags = (*HUB, "--set", f"shape={shape},secrets.shardToken.secret=token,image.tag=v1,router.image.tag=v1")
    before, after = list(pods(render(*flags))), list(pods(render(*flags, "--set", f"{tag}=v2")))
    differ = {new.part for old, new in zip(before, after, strict=True) if old != new}
    assert differ == changed & {pod.part for pod in before}


@pytest.mark.parametrize("shape", ["cell", "group"])
def test_liveness_waits_for_the_launcher(shape: str) -> None:
    """A router answers while shards restart; a shard that loads again does not. The launcher ends a hang first."""
    sizes = f"shape={shape},startupSeconds=2000,secrets.shardToken.secret=token"
    for pod in pods(render(*HUB, "--set", sizes)):
        startup, liveness = (pod.container[f"{name}Probe"] for name in ("startup", "liveness"))
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 2000
        patience = liveness["failureThreshold"] * liveness["periodSeconds"]
        assert patience >= (2000 if pod.part in {"shards", "workers"} else 4 * parsed(pod).hang_timeout)


@pytest.mark.parametrize("shape", ["cell", "split", "group"])
@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("scaled", ["replicas", "autoscaling.minReplicas"])
def test_an_update_never_leaves_zero_replicas(shape: str, replicas: int, scaled: str) -> None:
    autoscaling = "true" if scaled.startswith("autoscaling") else "false"
    sizes = f"shape={shape},secrets.shardToken.secret=token,{scaled}={replicas},autoscaling.maxReplicas=9,autoscaling.enabled={autoscaling}"
    for thing in render(*HUB, "--set", sizes):
        name = thing["metadata"]["name"]
        match thing["kind"]:
            case "Deployment" if name.endswith("router"):
                rolling = thing["spec"]["strategy"]["rollingUpdate"]
                # A second router is ready only if there is a second shard for it.
                assert rolling == (
                    {"maxSurge": 1, "maxUnavailable": 0} if replicas > 1 else {"maxSurge": 0, "maxUnavailable": 1}
                )
                continue
            case "Deployment":
                rolling = thing["spec"]["strategy"]["rollingUpdate"]
            case "LeaderWorkerSet":
                rolling = thing["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
            case _:
                continue
        assert thing["spec"]["replicas"] == replicas
        assert replicas - rolling["maxUnavailable"] >= 1
        assert rolling["maxSurge"] == (0 if replicas > 1 else 1), (
            "a spare GPU is needed only where there is one replica"
        )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_selectors_select_pods_and_ports_exist(path: Path) -> None:
    """Every Service, budget, policy and pool selects pods of the release that have the ports it names."""
    objects = example(path)
    if any("kserve" in thing["apiVersion"] for thing in objects):
        pytest.skip("KServe makes the Services")
    templates = [thing["spec"]["template"] for thing in objects if thing["kind"] == "Deployment"]
    for thing in objects:
        if thing["kind"] == "LeaderWorkerSet":
            templates += [thing["spec"]["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    selectors = {
        "Service": lambda spec: spec["selector"],
        "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
        "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        "InferencePool": lambda spec: spec["selector"]["matchLabels"],
    }
    for thing in objects:
        if select := selectors.get(thing["kind"]):
            wanted = select(thing["spec"]).items()
            selected = [one for one in templates if wanted <= one["metadata"]["labels"].items()]
            assert len(selected) == 1, f"{thing['kind']} {thing['metadata']['name']}"
            ports = {port["name"] for port in selected[0]["spec"]["containers"][0]["ports"]}
            if thing["kind"] == "Service":
                assert {port["targetPort"] for port in thing["spec"]["ports"]} <= ports
            if thing["kind"] == "NetworkPolicy":
                assert {port["port"] for rule in thing["spec"]["ingress"] for port in rule.get("ports", [])} <= ports
    accounts = {thing["metadata"]["name"] for thing in objects if thing["kind"] == "ServiceAccount"}
    assert {template["spec"]["serviceAccountName"] for template in templates} == accounts


def test_a_gateway_and_an_autoscaler_find_what_they_read() -> None:
    """Labels, gauges and ports by which an endpoint picker finds a cell; metrics are readable without a key."""
    objects = {thing["kind"]: thing for thing in example(CHART / "examples" / "gateway.yaml")}
    template = objects["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"]["llm-d.ai/engine-type"] == "trtllm-serve"
    pool = objects["InferencePool"]["spec"]
    assert pool["targetPorts"] == [{"number": 3000}]
    assert pool["endpointPickerRef"] == {
        "name": "text-generation-epp",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
    backend = objects["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", objects["InferencePool"]["metadata"]["name"])
    assert "--open-metrics" in template["spec"]["containers"][0]["args"]
    assert "--open-metrics" not in next(pods(render(*HUB))).args


def commands() -> list[str]:
    """Return the commands of docs/kubernetes.md that need no cluster, or have a form that needs none."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [
        line
        for line in lines
        if line.startswith(("helm upgrade --install ", "helm template ", "kubectl create secret "))
    ]


def test_the_objects_of_the_page_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(apiVersion: .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (job,) = map(yaml.safe_load, blocks)
    for minor in MINORS:
        assert problems([job], minor) == []


@pytest.mark.parametrize("command", commands() if PAGE.exists() else [])
def test_a_command_of_the_page_works(command: str) -> None:
    """`helm upgrade --install` is rendered and validated, `kubectl create` is a dry run."""
    program, *args = shlex.split(command, comments=True)
    if program == "kubectl":
        kubectl = TOOLS / "layer" / "kubectl" / "kubectl"
        done = subprocess.run(
            [kubectl, *args, "--dry-run=client", "-o=yaml"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert problems([yaml.safe_load(done.stdout)], MINORS[0]) == []
        return
    done = helm("template", *args[2 if args[:2] == ["upgrade", "--install"] else 1 :])
    assert done.returncode == 0, done.stderr
    objects = [thing for thing in yaml.safe_load_all(done.stdout) if thing]
    assert problems(objects, "1.35") == []
    for pod in pods(objects):
        parsed(pod)
