from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from text_generation_launcher.config import UNSUPPORTED, LauncherConfig, read_config
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

MODEL = ("--model-id", "some/model")
DECIDED_BY_THE_PLAN = (
    *("lifeline_fd", "model_path", "address", "replica", "rank", "world_size", "shard_address"),
    *("tensor_parallel", "group_address", "group_gpus", "gpus_per_node"),
    *("role", "http_worker", "worker_socket"),
    *("host_cache_fd", "host_cache_name", "host_cache_start", "host_cache_bytes"),
)
"""Settings of the children that are no settings of the launcher."""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LauncherConfig.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as exit_:
        read_config(argv, environ or {})
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "one line"
    assert error.startswith("text-generation-launcher: error: ")
    return error


def test_precedence_of_flag_environment_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(MODEL, {}).port == 3000
    monkeypatch.setenv("PORT", "80")
    assert read_config(MODEL, {}).port == 80
    assert read_config((*MODEL, "--port", "3000"), {}).port == 3000
    monkeypatch.setenv("PORT", "")  # an empty variable counts as unset
    monkeypatch.setenv("REVISION", "")
    config = read_config(MODEL, {"QUANTIZE": ""})
    assert (config.revision, config.port) == (None, 3000)
    assert read_config((*MODEL, "--port", "1"), {"AIP_HTTP_PORT": "8080"}).port == 8080, "Vertex AI's port wins"


def test_nodes_of_a_leader_worker_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.ns"}
    token = ("--shard-token", "t", "--insecure")
    config = read_config((*MODEL, *token), pod)
    assert (config.nodes, config.node_rank, config.leader_address) == (2, 1, "set-0.set.ns")
    assert read_config((*MODEL, *token, "--node-rank", "0"), pod).node_rank == 0
    monkeypatch.setenv("NODE_RANK", "0")
    assert read_config((*MODEL, *token), {**pod, "NODE_RANK": "0"}).node_rank == 0


def test_short_flags_of_tgi_are_not_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config((*MODEL, "-p", "80", "-g", "5", "-e"), {})
    assert (config.port, config.graceful_termination_timeout, config.env) == (80, 5.0, True)
    for name, value in {"P": "80", "E": "true", "ENV": "production"}.items():
        monkeypatch.setenv(name, value)
    config = read_config(MODEL, {})
    assert (config.port, config.env) == (3000, False)


def test_values_of_flags() -> None:
    """`sharded` takes a value, as in TGI; lists are repeated flags or comma-separated."""
    values = [read_config((*MODEL, *argv), {}).sharded for argv in (("--sharded", "true"), ("--sharded", "false"), ())]
    assert values == [True, False, None]
    for argv in (("--cors-allow-origin", "a", "--cors-allow-origin", "b"), ("--cors-allow-origin", "a,b")):
        assert read_config((*MODEL, *argv), {}).cors_allow_origin == ("a", "b")


def test_settings_of_the_children_that_the_launcher_lacks() -> None:
    children = set(RouterConfig.model_fields) | set(ShardConfig.model_fields)
    assert children - set(LauncherConfig.model_fields) == set(DECIDED_BY_THE_PLAN)


def test_settings_made_by_the_plan_are_not_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name in DECIDED_BY_THE_PLAN:
        flag = f"--{name.replace('_', '-')}"
        assert f"unrecognized arguments: {flag} 1" in usage_error(capsys, *MODEL, flag, "1")


def test_model_id_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model-id (or MODEL_ID) is missing" in usage_error(capsys)


def test_an_error_names_the_key_within_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    error = usage_error(capsys, *MODEL, "--kv-events-config", '{"hwm": 0}')
    assert "--kv-events-config (or KV_EVENTS_CONFIG): hwm: Input should be greater than 0, not 0" in error


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_tgi_flags_are_rejected_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = f"--{name.replace('_', '-')}"
    for words in ((flag, "1"), (f"{flag}=1",)):
        error = usage_error(capsys, *MODEL, *words)
        assert error.endswith(f"{flag} is a flag of TGI's that this server does not have: {UNSUPPORTED[name]}\n")
    error = usage_error(capsys, *MODEL, environ={name.upper(): "1"})
    assert f"{name.upper()} is set" in error
    assert error.endswith(f"unset it; {UNSUPPORTED[name]}\n")


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("--model-id m --cuda-graphs 1,2,4", {}),
        ("--model-id m", {"CUDA_GRAPHS": "0"}),
        ("--model-id m --watermark-gamma 0.5 --watermark-delta 2", {"WATERMARK_GAMMA": "0.25"}),
        ("--model-id m --master-addr localhost --master-port 29500", {}),
        ("--model-id m --speculate 2 --max-image-fetch-size 1000", {}),
        ("--model-id m --disable-custom-kernels --trust-remote-code --usage-stats off", {}),
        ("--model-id m", {"LOG_LEVEL": "info,text_generation_router=debug", "PROMETHEUS_PORT": "9100"}),
        ("--model-id m --num-shard 2 --quantize awq --port 8080 --json-output", {"HUGGINGFACE_HUB_CACHE": "/data"}),
        ("--model-id m --cors-allow-origin a --cors-allow-origin b -g 30 -p 80 -e", {"MAX_INPUT_LENGTH": "100"}),
    ],
)
def test_command_lines_of_tgi_are_accepted(line: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert read_config(line.split(), environ).model_id == "m"


@pytest.mark.parametrize(
    ("level", "meant"),
    [
        ("info,text_generation_router=debug", "info"),
        ("text_generation_router=trace,warn", "warning"),
        ("text_generation_launcher=debug", "info"),
        ("trace", "debug"),
        ("off", "error"),
        ("WARN", "warning"),
        ("Debug", "Debug"),
    ],
)
def test_a_filter_of_tgi_sets_the_level(level: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", level)
    assert read_config(MODEL, {}).log_level == meant


def test_an_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--log-level (or LOG_LEVEL)" in usage_error(capsys, *MODEL, "--log-level", "loud")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--modelid x", "did you mean --model-id?"),
        ("--model_id x", "did you mean --model-id?"),
        ("--model-id m --max-batch-prefil-tokens=5 --prot 1", "did you mean --max-batch-prefill-tokens, --port?"),
        ("chekc m", "did you mean check?"),
        ("--model-id m --zzz", "--help lists the flags"),
    ],
)
def test_a_mistyped_flag_gets_a_hint(line: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage_error(capsys, *line.split()).endswith(f"; {hint}\n")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_config([flag], {})
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"text-generation-launcher {version('text-generation-trtllm')}\n"


def test_rejection_without_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hush" not in usage_error(capsys, *MODEL, environ={"NGROK_AUTHTOKEN": "hush"})
    message = usage_error(capsys, *MODEL, "--shard-token", "hüsh")
    assert "--shard-token (or SHARD_TOKEN)" in message
    assert "hüsh" not in message


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--max-input-tokens 5 --max-input-length 6",
            "Both `max_input_tokens` (5) and `max_input_length` (6) are set. Please define only `max_input_tokens` as "
            "`max_input_length is deprecated for naming consistency.",
        ),
        ("--max-input-tokens 10 --max-total-tokens 10", "`max_input_tokens`(10) must be < `max_total_tokens`(10)"),
        ("--max-input-length 11 --max-total-tokens 10", "`max_input_tokens`(11) must be < `max_total_tokens`(10)"),
        (
            "--max-total-tokens 10 --max-batch-total-tokens 9",
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 10 and 9",
        ),
        ("--num-shard 0", "`num_shard` cannot be < 1"),
        ("--num-replicas 0", "--num-replicas (or NUM_REPLICAS)"),
        ("--max-shard-restarts -1", "--max-shard-restarts (or MAX_SHARD_RESTARTS)"),
        ("--port 0", "--port (or PORT)"),
        (
            "--port x",
            "--port (or PORT): Input should be a valid integer, unable to parse string as an integer, not 'x'",
        ),
        ("--num-shard", "argument --num-shard: expected one argument"),
        ("--shard-tls-cert a", "--shard-tls-cert, --shard-tls-key and --shard-tls-ca belong together"),
        ("--validation-workers 0", "--validation-workers (or VALIDATION_WORKERS)"),
        ("--max-batch-size 0", "--max-batch-size (or MAX_BATCH_SIZE)"),
        ("--engine vllm", "--engine (or ENGINE)"),
        ("--trtllm-launch srun", "--trtllm-launch (or TRTLLM_LAUNCH)"),
        ("--lora-adapters a=b=c", "Invalid LoRA adapter format: a=b=c, not 'a=b=c'"),
        ("--lora-adapters some/model=/a", "`lora_adapters`: some/model is the name of the model itself"),
        ("--trtllm-hosts a,b", "`trtllm_hosts` is for --trtllm-launch mpirun"),
        ("--trtllm-launch mpirun --trtllm-hosts a,-b", "`trtllm_hosts`: invalid host name '-b'"),
        ("--trtllm-launch mpirun --trtllm-hosts a,a", "`trtllm_hosts`: duplicate host"),
        ("--trtllm-launch mpirun --trtllm-hosts a,b --num-replicas 2", "the ranks of several hosts are one replica"),
        ("--num-sh 1", "unrecognized arguments: --num-sh 1; did you mean --num-shard?"),
        ("--node-rank 1", "`node_rank`(1) must be < `nodes`(1)"),
        ("--nodes 2 --shard-token t", "`nodes` is 2: --leader-address (or LEADER_ADDRESS) is missing"),
        ("--nodes 2 --leader-address head --shard-token t", "other machines reach head:29500: give --shard-tls-cert"),
        ("--nodes 2 --leader-address head", "`nodes` is 2: the launchers of all nodes need the same SHARD_TOKEN"),
        ("--nodes 2 --leader-address head --shard-token t --insecure --num-replicas 2", "`num_replicas` must be 1"),
        ("--prefill-replicas 1 --num-replicas 2", "`prefill_replicas` needs a host cache (--host-cache-size)"),
        (
            "--prefill-replicas 2 --num-replicas 2 --host-cache-size 1GiB",
            "`prefill_replicas`(2) must be < `num_replicas`(2)",
        ),
        (
            "--prefill-replicas 1 --num-replicas 2 --host-cache-size 1GiB --parts shards --shard-tcp-port 5000 --insecure",
            "that all replicas share (--parts all)",
        ),
        ("--places ray", "other machines reach shards on other nodes: give --shard-tls-cert"),
        ("--places ray --insecure --shard-uds-path /s", "`places` is ray: --shard-uds-path is not supported with it"),
        (
            "--places ray --insecure --nodes 2 --leader-address head --shard-token t",
            "--nodes is not supported with it",
        ),
        ("--parts router --shard-token t", "`parts` is router: --shards (or SHARDS) is missing"),
        ("--shards a:1", "`parts` is all: --shards and --peers are for --parts router"),
        ("--peers a:1", "`parts` is all: --shards and --peers are for --parts router"),
        ("--parts shards --shard-token t", "--shard-tcp-port or --shard-uds-path is missing"),
        ("--parts shards --shard-tcp-port 5000", "need the same SHARD_TOKEN"),
        ("--parts router --shards a:1", "need the same SHARD_TOKEN"),
        ("--parts shards --shard-token t --shard-tcp-port 5000 --shard-hostname 10.0.0.1", "or --insecure"),
        ("--num-replicas 1000000", "--num-replicas (or NUM_REPLICAS): Input should be less than or equal to 4096"),
        ("--max-batch-size 1000000", "Input should be less than or equal to 65536, not '1000000'"),
        ("--max-batch-prefill-tokens 5000000000", "less than or equal to 2147483647, not '5000000000'"),
        ("--max-batch-total-tokens 5000000000", "less than or equal to 2147483647, not '5000000000'"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_2(
    flags: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in usage_error(capsys, *MODEL, *flags.split())


def test_a_value_may_have_line_breaks() -> None:
    template = "{% for x in y %}\n--a={{ x }}\n{% endfor %}"
    assert read_config([*MODEL, f"--chat-template={template}"], {}).chat_template == template
    assert read_config([*MODEL, "--chat-template", template], {}).chat_template == template
    assert read_config([*MODEL, "--trtllm-options", f"---\n{template}"], {}).trtllm_options == f"---\n{template}"


def test_the_token_for_the_shards_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("secret-token\n")
    config = read_config([*MODEL, "--shard-token-file", str(file)], {})
    assert (config.shard_token, config.shard_token_file) == ("secret-token", "")
    read_end, write_end = os.pipe()  # as a shell's <(command)
    with os.fdopen(read_end):
        with os.fdopen(write_end, "w") as pipe:
            pipe.write("piped-token\n")
        assert read_config([*MODEL, f"--shard-token-file=/dev/fd/{read_end}"], {}).shard_token == "piped-token"
    for content, reason in (
        (b"\n", "is empty"),
        (b"t\xc3\xb6", "not ASCII"),
        (b"two words", "--shard-token (or SHARD_TOKEN)"),
        (b"t" * 4097, "is larger than 4,096 bytes"),
    ):
        file.write_bytes(content)
        message = usage_error(capsys, *MODEL, "--shard-token-file", str(file))
        assert reason in message
        assert "words" not in message
    assert "No such file" in usage_error(capsys, *MODEL, "--shard-token-file", "/no/such/file")


@pytest.mark.parametrize("keys", [",", " ", " , "])
def test_api_key_list_without_keys_is_rejected(
    keys: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", keys)
    assert "it contains no key" in usage_error(capsys, *MODEL)
