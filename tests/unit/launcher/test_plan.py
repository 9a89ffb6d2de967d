from __future__ import annotations

from pathlib import Path

import pytest
from launch_plans import config, context, parsed, plan, router_of, shards_of

from text_generation_launcher.checks import check_ports
from text_generation_launcher.counts import PlanError, compute_type, count_partitions, count_shards
from text_generation_launcher.devices import Devices
from text_generation_launcher.model import hub_tokens
from text_generation_router.config import RouterConfig, listen_host

# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_reach_their_children() -> None:
    settings: dict[str, object] = {
        "model_id": "my/model",
        "json_output": True,
        "log_level": "debug",
        "revision": "main",
        "port": 8080,
        "engine": "echo",
        "dtype": "float32",
        "cpu_memory_fraction": 0.3,
        "num_threads": 2,
        "reflection": True,
        "shutdown_timeout": 3.0,
        "echo_step_ms": 1.5,
        "hang_timeout": 30.0,
        "max_batch_prefill_tokens": 64,
        "trtllm_options": "max_num_tokens: 4096\n# more\n",
        "max_concurrent_requests": 7,
        "max_total_tokens": 100,
        "max_batch_size": 8,
        "waiting_served_ratio": 0.3,
        "cors_allow_origin": ("http://a", "http://b,c"),
    }
    made = plan(**settings)
    (shard,), router = shards_of(made), router_of(made)
    for name, value in settings.items():
        children = [child for child in (shard, router) if name in type(child).model_fields]
        assert children, name
        assert [getattr(child, name) for child in children] == [value] * len(children), name
    assert (shard.model_path, shard.rank, shard.world_size, router.model_path) == ("/models/m", 0, 1, "/models/m")
    for child, spec in ((shard, made.shards[0]), (router, made.router[0])):
        assert (child.lifeline_fd,) == spec.inherited_fds == (7,)


def test_settings_with_another_name_or_default_in_a_child() -> None:
    made = plan()
    assert (shards_of(made)[0].max_batch_size, router_of(made).max_batch_size) == (0, None)
    for name in ("max_input_length", "max_input_tokens"):
        assert router_of(plan(**{name: 12})).max_input_tokens == 12


def test_environment_does_not_override_a_flag_with_the_default_value() -> None:
    """Defaults are omitted from the child's arguments, so the child must not read the variable."""
    own = {"PORT": "80", "port": "81"}
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    made = plan(context(environ={**kept, **own, "RANK": "3", "LOG_LEVEL": "debug"}), port=3000)
    assert made.router[0].env == {**kept, "RANK": "3"}
    assert made.shards[0].env == {**kept, **own}


def test_children_are_planned_without_reading_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = plan()
    monkeypatch.setenv("MAX_BEST_OF", "9")
    monkeypatch.setenv("DEVICE", "cuda:7")
    assert plan() == quiet


def test_hf_api_token_is_passed_as_hf_token() -> None:
    assert hub_tokens({"HF_API_TOKEN": "a"})["HF_TOKEN"] == "a"
    assert hub_tokens({"HF_API_TOKEN": "a", "HF_TOKEN": "b"})["HF_TOKEN"] == "b"


def test_secrets_reach_no_child_and_settings_of_libraries_reach_all() -> None:
    secret = ("HF_TOKEN", "HF_API_TOKEN", "AWS_ACCESS_KEY_ID", "AZURE_CLIENT_ID", "GOOGLE_APPLICATION_CREDENTIALS", "DB_PASSWORD",
              "WANDB_API_KEY", "MY_SECRET_2", "client_secret", "TOKEN")  # fmt: skip
    kept = ("PATH", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "TLLM_LICENSE_KEY", "OMPI_MCA_orte_precondition_transports_key",
            "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "MAX_TOKENS", "TORCH_KEY", "KEYBOARD")  # fmt: skip
    made = plan(context(environ=dict.fromkeys((*secret, *kept), "x")))
    for child in (*made.router, *made.shards):
        assert set(child.env) & set(secret) == set()
        assert set(kept) <= set(child.env)


def test_api_key_is_passed_only_in_the_routers_environment() -> None:
    (router,) = plan(api_key=("hush", "hush2")).router
    assert not any("hush" in word for word in router.argv)
    assert router.env["API_KEY"] == "hush,hush2"
    made = plan(context(environ={"API_KEY": "hush"}))
    assert all("API_KEY" not in child.env for child in (*made.router, *made.shards))


def test_http_workers_are_planned_beside_a_scheduler_process() -> None:
    """HTTP workers do not call the shards: they get no token for them."""
    made = plan(http_workers=2, shard_token="hush", api_key=("key",))
    names = ["router-scheduler", "http-worker-0", "http-worker-1"]
    assert [process.name for process in made.router] == names
    parts = [parsed(RouterConfig, process, "text_generation_router") for process in made.router]
    assert [part.process_name for part in parts] == names
    assert {(part.worker_socket, part.port, part.http_workers) for part in parts} == {("/tmp/tgi-1/link", 3000, 2)}
    assert [process.env.get("SHARD_TOKEN") for process in made.router] == ["hush", None, None]
    assert {process.env["API_KEY"] for process in made.router} == {"key"}


def test_shard_token_is_passed_only_in_environments() -> None:
    made = plan(shard_token="hush", num_replicas=2)
    assert not any("hush" in word for child in (*made.router, *made.shards) for word in child.argv)
    assert [child.env["SHARD_TOKEN"] for child in (*made.router, *made.shards)] == ["hush"] * 3


def test_stop_timeouts_exceed_those_of_the_children() -> None:
    made = plan(shutdown_delay=5.0, graceful_termination_timeout=30.0, drain_timeout=20.0, shutdown_timeout=4.0)
    assert made.router[0].stop_timeout > 35.0
    assert made.shards[0].stop_timeout > 24.0


@pytest.mark.parametrize(
    ("hostname", "host", "url"),
    [
        ("localhost", "127.0.0.1", "http://127.0.0.1:3000"),
        ("::", "::", "http://127.0.0.1:3000"),
        ("::1", "::1", "http://[::1]:3000"),
        ("my-pod-0", "::", "http://127.0.0.1:3000"),
        ("[::1]", "::1", "http://[::1]:3000"),
    ],
)
def test_host_name_means_all_addresses(hostname: str, host: str, url: str) -> None:
    made = plan(hostname=hostname)
    assert listen_host(hostname) == made.host == router_of(made).hostname == host
    assert made.url == url


def test_compute_type_counts_the_parts_of_all_replicas() -> None:
    assert compute_type(1, Devices(2, None)) == "1-gpu"
    assert router_of(plan(compute_type="mine")).compute_type == "mine"
    assert router_of(plan(num_replicas=3)).compute_type == "3-cpu"
    for engine in ("torch", "tensorrt-llm"):
        settings = {"engine": engine, "num_shard": 4, "num_replicas": 2}
        assert router_of(plan(8, **settings)).compute_type == "8-nvidia-h200"
        assert count_partitions(config(**settings), Devices(8, None)) == 8


# ---------------------------------------------------------------------------------------------- replicas and their ranks


def test_one_shard_is_the_default() -> None:
    for settings in ({}, {"num_shard": 1}, {"sharded": False}, {"sharded": False, "num_shard": 1}):
        assert [count_shards(config(**settings), Devices(gpus, None)) for gpus in (0, 1, 8)] == [1, 1, 1]


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (3, 1), (2, 2)])
def test_each_rank_of_each_replica_is_a_process_and_the_router_knows_the_leaders(replicas: int, ranks: int) -> None:
    made = plan(8, num_replicas=replicas, num_shard=ranks)
    shards = shards_of(made)
    numbers = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
    assert [(shard.replica, shard.rank, shard.world_size) for shard in shards] == [(*pair, ranks) for pair in numbers]
    assert [(spec.replica, spec.rank) for spec in made.shards] == numbers
    names = [f"shard-{replica}" + (f"-rank-{rank}" if ranks > 1 else "") for replica, rank in numbers]
    assert [spec.name for spec in made.shards] == [shard.process_name for shard in shards] == names
    assert [len(group) for group in made.groups] == [ranks] * replicas
    addresses = [f"unix:///tmp/tgi-1/{name.replace('-rank-', '-')}" for name in names]
    assert [spec.address for spec in made.shards] == [shard.address for shard in shards] == addresses
    meeting = [f"unix:///tmp/tgi-1/group-{replica}" if ranks > 1 else "" for replica, _ in numbers]
    assert [spec.group_address for spec in made.shards] == [shard.group_address for shard in shards] == meeting
    assert router_of(made).shard_address == tuple(addresses[::ranks])


def test_each_node_starts_its_part_of_the_ranks_and_node_0_the_router() -> None:
    for address, port in (("head", ""), ("10.0.0.1:4000", ""), ("[fd00::1]", ":29500"), ("[fd00::1]:4000", "")):
        nodes = [
            plan(4, num_shard=8, nodes=2, node_rank=number, leader_address=address, shard_token="t", insecure=True)
            for number in (0, 1)
        ]
        assert [spec.rank for node in nodes for spec in node.shards] == list(range(8))
        assert {(shard.world_size, shard.replica) for node in nodes for shard in shards_of(node)} == {(8, 0)}
        where = f"{address}:29500" if address == "head" else address + port
        assert {shard.group_address for node in nodes for shard in shards_of(node)} == {where}
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in nodes[1].shards] == ["0", "1", "2", "3"]
    assert [spec.address for spec in nodes[1].shards] == [f"unix:///tmp/tgi-1/shard-0-{number}" for number in range(4)]
    assert (router_of(nodes[0]).shard_address, nodes[1].router, nodes[1].ports) == (
        ("unix:///tmp/tgi-1/shard-0-0",),
        (),
        (),
    )
    assert router_of(nodes[0]).compute_type == "8-nvidia-h200"
    assert count_shards(config(nodes=2, leader_address="head", shard_token="t", insecure=True), Devices(4, None)) == 8
    cpu = plan(nodes=2, leader_address="head", shard_token="t", insecure=True, device="cpu")
    assert [(shard.rank, shard.world_size) for shard in shards_of(cpu)] == [(0, 2)]
    with pytest.raises(PlanError, match="cannot be divided among 2 nodes"):
        plan(8, num_shard=7, nodes=2, leader_address="head", shard_token="t", insecure=True)


def test_in_a_ray_cluster_the_router_finds_the_shards_by_a_file() -> None:
    facts = context(4, members_file=Path("/proc/1/fd/9"))
    made = plan(facts, places="ray", num_replicas=2, num_shard=2, insecure=True)
    assert {spec.address for spec in made.shards} == {"0.0.0.0:0"}
    assert (router_of(made).shards, router_of(made).shard_address) == ("file:///proc/1/fd/9", ())


def test_addresses_of_shards() -> None:
    groups = {"num_replicas": 2, "num_shard": 2}
    assert plan(shard_uds_path="/run/tgi").shards[0].address == "unix:///run/tgi-0"
    assert plan(shard_uds_path="here").shards[0].address == f"unix://{Path.cwd()}/here-0"
    paths = [shard.address for shard in plan(8, **groups, shard_uds_path="/run/tgi").shards]
    assert paths == [f"unix:///run/tgi-{place}" for place in ("0-0", "0-1", "1-0", "1-1")]
    made = plan(8, **groups, shard_tcp_port=5000)
    assert [shard.address for shard in made.shards] == [f"127.0.0.1:{port}" for port in (5000, 5001, 5002, 5003)]
    assert router_of(made).shard_address == ("127.0.0.1:5000", "127.0.0.1:5002")
    probed = [shard.health_port for shard in shards_of(plan(8, **groups, health_port=6000))]
    assert probed == [6000, 6001, 6002, 6003]


@pytest.mark.parametrize(
    ("environ", "settings", "devices"),
    [
        ({}, {"num_replicas": 2}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, {"num_replicas": 2}, ["3", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a1b,MIG-2c3d"}, {"num_replicas": 2}, ["GPU-0a1b", "MIG-2c3d"]),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, {"num_replicas": 2}, ["0", "1"]),
        ({}, {"num_shard": 2, "device": "cuda"}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "7,5,3,1,0,2,4,6"}, {"num_replicas": 2, "num_shard": 2}, ["7", "5", "3", "1"]),
        ({}, {"sharded": True}, [str(number) for number in range(8)]),
        ({}, {}, [None]),
        ({}, {"num_replicas": 3, "device": "cpu"}, [None] * 3),
        ({}, {"num_replicas": 3, "engine": "echo"}, [None] * 3),
    ],
)
def test_each_of_several_shards_has_its_own_device(
    environ: dict[str, str], settings: dict[str, object], devices: list[str | None]
) -> None:
    made = plan(context(8, environ=environ), **settings)
    assert [shard.env.get("CUDA_VISIBLE_DEVICES") for shard in made.shards] == devices
    if devices[0] is not None:
        assert {(shard.cpu_memory_fraction, shard.num_threads) for shard in shards_of(made)} == {(0.4, 0)}


def test_rank_0_observes_the_gpus_of_its_group() -> None:
    made = plan(context(8, environ={"CUDA_VISIBLE_DEVICES": "7,5,3,1"}), num_replicas=2, num_shard=2)
    assert [shard.group_gpus for shard in shards_of(made)] == ["7,5", "", "3,1", ""]
    assert [shard.group_gpus for shard in shards_of(plan(8, num_replicas=2))] == ["", ""]


def test_each_replica_has_its_own_trace_file() -> None:
    assert [shard.trace_steps for shard in shards_of(plan(trace_steps="/tmp/steps"))] == ["/tmp/steps"]
    made = plan(num_replicas=2, trace_steps="/tmp/steps")
    assert [shard.trace_steps for shard in shards_of(made)] == ["/tmp/steps-0", "/tmp/steps-1"]


@pytest.mark.parametrize(
    ("cpus", "replicas", "environ", "num_threads", "expected"),
    [
        (8, 1, {}, 0, 0),  # chosen by torch
        (8, 2, {}, 0, 4),
        (8, 3, {}, 0, 2),
        (2, 3, {}, 0, 1),
        (8, 2, {}, 8, 8),  # explicit
        (8, 2, {"OMP_NUM_THREADS": "1"}, 0, 0),  # OMP_NUM_THREADS has precedence
    ],
)
def test_replicas_on_a_cpu_share_its_cores(
    cpus: int, replicas: int, environ: dict[str, str], num_threads: int, expected: int
) -> None:
    made = plan(context(cpus=cpus, environ=environ), num_replicas=replicas, num_threads=num_threads)
    assert [shard.num_threads for shard in shards_of(made)] == [expected] * replicas


@pytest.mark.parametrize("gpus", [0, 8])
def test_replicas_and_ranks_on_a_cpu_share_its_memory(gpus: int) -> None:
    made = plan(gpus, num_replicas=4, cpu_memory_fraction=0.8, device="cpu")
    assert [shard.cpu_memory_fraction for shard in shards_of(made)] == [0.2] * 4
    made = plan(gpus, num_replicas=2, num_shard=2, device="cpu")
    assert {(shard.cpu_memory_fraction, shard.num_threads) for shard in shards_of(made)} == {(0.1, 2)}


def test_torch_log_level_of_groups() -> None:
    assert {shard.env["TORCH_CPP_LOG_LEVEL"] for shard in plan(8, num_shard=2).shards} == {"ERROR"}
    asked = context(8, environ={"TORCH_CPP_LOG_LEVEL": "INFO"})
    assert {shard.env["TORCH_CPP_LOG_LEVEL"] for shard in plan(asked, num_shard=2).shards} == {"INFO"}
    assert "TORCH_CPP_LOG_LEVEL" not in plan(8).shards[0].env


# ---------------------------------------------------------------------------------------------------------- rejections

FEW = "not enough cuda devices:"
MANY = {"num_shard": 4, "num_replicas": 3}
TRTLLM = {"engine": "tensorrt-llm"}


def rejection(gpus: int, **settings: object) -> str:
    with pytest.raises(PlanError) as error:
        plan(gpus, **settings)
    return str(error.value)


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
@pytest.mark.parametrize(
    ("gpus", "settings", "text"),
    [
        (0, {"sharded": True}, "`sharded` is true but only found 0 CUDA devices"),
        (1, {"sharded": True}, "`sharded` is true but only found 1 CUDA devices"),
        (8, {"sharded": True, "num_shard": 1}, "`sharded` is true but `num_shard` <= 1"),
        (0, {"num_shard": 2}, f"{FEW} 2 shards take one each (--num-replicas 1, --num-shard 2), and 0 are visible"),
        (8, {"num_shard": 9}, f"{FEW} 9 shards take one each (--num-replicas 1, --num-shard 9), and 8 are visible"),
        (2, {"num_replicas": 3}, f"{FEW} 3 shards take one each (--num-replicas 3, --num-shard 1), and 2 are visible"),
        (8, MANY, f"{FEW} 12 shards take one each (--num-replicas 3, --num-shard 4), and 8 are visible"),
        (
            4,
            {"sharded": True, "num_replicas": 2},
            f"{FEW} 8 shards take one each (--num-replicas 2, --num-shard 4), and 4 are visible",
        ),
        (8, {"device": "cuda:1", "num_shard": 2}, "`device` is cuda:1, and 2 shards take a device each"),
        (8, {"device": "cuda:1", "num_replicas": 2}, "`device` is cuda:1, and 2 replicas take a device each"),
    ],
)
def test_unavailable_devices_are_rejected(gpus: int, settings: dict[str, object], text: str, engine: str) -> None:
    assert rejection(gpus, engine=engine, **settings) == text


def test_device_number() -> None:
    assert plan(2, device="cuda:1").shards
    assert rejection(2, **TRTLLM, device="cuda:2") == "`device` is cuda:2, and 2 devices are visible"


def test_echo_engine_has_no_groups() -> None:
    text = "2 shards were asked for (--num-shard, --sharded): the echo engine has no model to split"
    assert rejection(8, engine="echo", num_shard=2) == text


@pytest.mark.parametrize(
    "settings",
    [
        {"num_shard": 8},
        {"shard_tcp_port": 65532, "num_shard": 4},
        {"shard_tcp_port": 2996, "num_shard": 4},
        {"shard_tcp_port": 2999, "num_shard": 4, **TRTLLM},  # one shard process for all four GPUs
    ],
)
def test_available_ports_are_accepted(settings: dict[str, object]) -> None:
    check_ports(config(**settings), Devices(8, None))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shard_tcp_port": 65533, "num_shard": 4}, "`shard_tcp_port`(65533) for 4 shards: port 65536 does not exist"),
        ({"health_port": 65535, "num_replicas": 2}, "`health_port`(65535) for 2 shards: port 65536 does not exist"),
        (
            {"shard_tcp_port": 2997, "num_replicas": 2, "num_shard": 2},
            "`shard_tcp_port`(2997) for 4 shards: 3000 is the router's",
        ),
        ({"health_port": 2999, "num_replicas": 2}, "`health_port`(2999) for 2 shards: 3000 is the router's"),
        (
            {"shard_tcp_port": 5000, "health_port": 5001, "num_shard": 2},
            "`health_port`(5001) for 2 shards: 5001 is of `shard_tcp_port`",
        ),
    ],
)
def test_unavailable_ports_are_rejected(settings: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError) as error:
        check_ports(config(**settings), Devices(8, None))
    assert str(error.value) == text


# --------------------------------------------------------------------------------------------------------------- parts

SPLIT: dict[str, object] = {"shard_token": "hush", "engine": "echo"}


def test_parts_are_planned_apart() -> None:
    shards = plan(**SPLIT, parts="shards", num_replicas=2, shard_tcp_port=5000, shard_hostname="::1")
    assert shards.router == ()
    assert shards.ports == ()
    assert [shard.address for shard in shards_of(shards)] == ["[::1]:5000", "[::1]:5001"]
    router = plan(**SPLIT, parts="router", shards="dns://shards:5000", peers="dns://routers:3000")
    assert not router.shards
    assert (router_of(router).shards, router_of(router).peers) == ("dns://shards:5000", "dns://routers:3000")
    assert router.router[0].env["SHARD_TOKEN"] == "hush"
    assert not config(**SPLIT | {"engine": "torch"}, parts="router", shards="a:1").needs_weights
