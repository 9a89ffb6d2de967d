"""The Helm chart with the launcher's plan: the processes of every pod start, and what is beside the pods fits them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from chart import CHART, EXAMPLES, HUB, MINORS, Pod, example, helm, needs_helm, parsed, pods, problems, render, set_args

from text_generation_launcher.checks import check_ports
from text_generation_launcher.devices import Devices
from text_generation_launcher.plan import LaunchContext, LaunchPlan, make_plan
from text_generation_proto.addresses import split_host_port

pytestmark = needs_helm

SHAPES = ("cell", "split", "group")


def planned(pod: Pod) -> LaunchPlan:
    """Return the processes that the launcher of a pod would start on the GPUs of the pod. Raises PlanError."""
    config = parsed(pod).model_copy(update={"engine": "torch"})
    devices = Devices(int(pod.container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)), None)
    check_ports(config, devices)
    folder = Path("/tmp")
    return make_plan(config, LaunchContext(devices, folder, folder, lifeline_fd=-1, environ={}, cpus=16))


def listeners(pod: Pod) -> list[int]:
    """Return the TCP ports on which the processes of a pod listen."""
    plan = planned(pod)
    addresses = [shard.address for shard in plan.shards if not shard.address.startswith("unix:")]
    health = [port for shard in plan.shards if (port := shard.config.health_port)]
    return [*plan.ports, *(split_host_port(address)[1] for address in addresses), *health]


ODD_VALUES: tuple[dict[str, object], ...] = (
    *({"shape": "cell", "flags": {"num-shard": size, "num-replicas": count}} for size in (1, 2, 8) for count in (1, 2)),
    *({"shape": "split", "flags": {"num-shard": size}} for size in (1, 2, 4, 8, 64)),
    *({"shape": "group", "group": {"size": hosts}, "flags": {"num-shard": 8 * hosts}} for hosts in (2, 3, 16)),
    *({"shape": shape, "ports": {"http": 80, "management": 81, "shards": 90, "health": 190}} for shape in SHAPES),
    *({"shape": shape, "ports": {"shards": 60000, "health": 60100}} for shape in SHAPES),
    *({"shape": shape, "flags": {"http-workers": 4, "shutdown-delay": 0}} for shape in SHAPES),
    *({"shape": shape, "tls": {"enabled": False}, "router": {"discovery": "dns"}} for shape in SHAPES),
    *({"shape": shape, "autoscaling": {"enabled": True}, "kserve": {}} for shape in SHAPES),
    *({"shape": shape, "model": {"revision": "main", "cache": {"create": True}}} for shape in SHAPES),
    *({"shape": shape, "fullnameOverride": "llm", "flags": {"max-batch-size": 8, "device": "cpu"}} for shape in SHAPES),
    {"gateway": {"pool": {"enabled": True, "endpointPicker": {"name": "epp"}}}},
)
"""Values of releases whose pods must start."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_pods_of_an_example_start_and_listen_on_ports_of_their_own(path: Path) -> None:
    for pod in pods(example(path)):
        ports = listeners(pod)
        assert len(set(ports)) == len(ports), pod.owner
        if pod.owner.startswith(("Deployment", "LeaderWorkerSet")):
            assert {port["containerPort"] for port in pod.container["ports"]} <= set(ports)


@pytest.mark.parametrize("values", ODD_VALUES, ids=json.dumps)
@pytest.mark.parametrize("release", ["demo", "123"])
def test_the_pods_of_odd_values_start(values: dict[str, object], release: str) -> None:
    flags = values.get("flags")
    gpus = flags.get("num-shard", 1) * flags.get("num-replicas", 1) if isinstance(flags, dict) else 1
    args = set_args({"secrets.shardToken.secret": "token", "resources.limits": {"nvidia.com/gpu": gpus}, **values})
    objects = render(*HUB, *args, release=release)
    assert problems(objects, MINORS[-1]) == []
    for pod in pods(objects):
        ports = listeners(pod)
        assert len(set(ports)) == len(ports), pod.owner


@pytest.mark.parametrize("shape", ["split", "group"])
def test_routers_reach_each_other_where_clients_are_restricted(shape: str) -> None:
    """A router asks its peers at their port for HTTP whether they live."""
    clients = {"networkPolicy.clients": [{"namespaceSelector": {}}], "secrets.shardToken.secret": "token"}
    objects = render(*HUB, "--set", f"shape={shape}", *set_args(clients))
    (router,) = (pod for pod in pods(objects) if pod.part == "router")
    peers = next(arg for arg in router.args if arg.startswith("--peers="))
    (policy,) = (
        thing["spec"]
        for thing in objects
        if thing["kind"] == "NetworkPolicy" and thing["metadata"]["name"].endswith("router")
    )
    (http,) = (rule for rule in policy["ingress"] if rule["ports"] == [{"port": "http"}])
    assert {"podSelector": policy["podSelector"]} in http["from"]
    assert peers.endswith(f":{next(p['containerPort'] for p in router.container['ports'] if p['name'] == 'http')}")


def test_a_subchart_takes_a_condition(tmp_path: Path) -> None:
    """An umbrella chart gives its `enabled` to the chart too, as Helm does for conditions."""
    dependency = {
        "name": "text-generation",
        "version": "0.1.0",
        "repository": "",
        "condition": "text-generation.enabled",
    }
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "text-generation").symlink_to(CHART)
    for enabled in (True, False):
        values = {"text-generation": {"enabled": enabled, "model": {"hub": "org/model"}}}
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        done = helm("template", "demo", tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("kind: Deployment" in done.stdout) is enabled


def test_an_ingress_a_cache_and_further_objects_are_made() -> None:
    values = {
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example.com"], "tls": [{"secretName": "c"}]},
        "model.cache": {"create": True, "accessModes": ["ReadWriteMany"], "storageClass": "fast", "size": "5Gi"},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-one"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: two}",
        ],
    }
    objects = render(*HUB, *set_args(values))
    assert [problems(objects, minor) for minor in MINORS] == [[]] * len(MINORS)
    found = {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}
    assert {("ConfigMap", "demo-one"), ("ConfigMap", "two")} <= found.keys()
    claim = found["PersistentVolumeClaim", "demo-text-generation-cache"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    (pod,) = pods(objects)
    assert {"claimName": claim["metadata"]["name"]} in [
        each.get("persistentVolumeClaim") for each in pod.spec["volumes"]
    ]
    (path,) = found["Ingress", "demo-text-generation"]["spec"]["rules"][0]["http"]["paths"]
    service = found["Service", path["backend"]["service"]["name"]]["spec"]
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["ports"]}
