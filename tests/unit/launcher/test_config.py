from __future__ import annotations

import pytest

from text_generation_launcher.config import UNSUPPORTED, LauncherConfig, child_settings, read_config
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

MODEL = ("--model-id", "some/model")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LauncherConfig.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as exit_:
        read_config(argv, environ or {})
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "one line"
    assert error.startswith("text-generation-launcher: error: ")
    return error


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(MODEL, {}).port == 3000
    monkeypatch.setenv("PORT", "80")
    assert read_config(MODEL, {}).port == 80
    assert read_config((*MODEL, "--port", "3000"), {}).port == 3000


def test_an_empty_variable_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISION", "")
    monkeypatch.setenv("PORT", "")
    config = read_config(MODEL, {})
    assert (config.revision, config.port) == (None, 3000)


def test_the_short_flags_are_those_of_tgi() -> None:
    config = read_config((*MODEL, "-p", "80", "-g", "5", "-e"), {})
    assert (config.port, config.graceful_termination_timeout, config.env) == (80, 5.0, True)


def test_short_flags_and_env_are_no_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"P": "80", "E": "true", "ENV": "production"}.items():
        monkeypatch.setenv(name, value)
    config = read_config(MODEL, {})
    assert (config.port, config.env) == (3000, False)


def test_sharded_takes_a_value_as_in_tgi() -> None:
    assert read_config((*MODEL, "--sharded", "true"), {}).sharded is True
    assert read_config((*MODEL, "--sharded", "false"), {}).sharded is False
    assert read_config(MODEL, {}).sharded is None


def test_origins_come_one_a_flag_or_with_commas() -> None:
    one_a_flag = read_config((*MODEL, "--cors-allow-origin", "http://a", "--cors-allow-origin", "http://b"), {})
    assert one_a_flag.cors_allow_origin == ("http://a", "http://b")
    assert read_config((*MODEL, "--cors-allow-origin", "http://a,http://b"), {}).cors_allow_origin == (
        "http://a",
        "http://b",
    )


def test_every_setting_of_the_children_is_the_launchers_or_the_plans() -> None:
    plans = {
        *("lifeline_fd", "model_path", "address", "replica", "rank", "world_size", "shard_address"),
        *("tensor_parallel", "group_address"),
    }
    children = set(RouterConfig.model_fields) | set(ShardConfig.model_fields)
    assert children - set(LauncherConfig.model_fields) == plans


def test_a_childs_settings_are_the_launchers() -> None:
    config = read_config((*MODEL, "--echo-step-ms", "5", "--max-best-of", "7"), {})
    assert child_settings(config, ShardConfig)["echo_step_ms"] == 5.0
    assert "max_best_of" not in child_settings(config, ShardConfig)
    assert child_settings(config, RouterConfig)["max_best_of"] == 7


@pytest.mark.parametrize(
    "name",
    ["rank", "address", "shard-address", "lifeline-fd", "model-path", "tensor-parallel", "world-size", "group-address"],
)
def test_what_the_plan_decides_is_no_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"unrecognized arguments: --{name} 1" in complaint(capsys, *MODEL, f"--{name}", "1")


def test_there_is_no_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model-id (or MODEL_ID) is missing" in complaint(capsys)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_flag_of_tgi_that_is_not_served_is_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert f"{flag} is a flag of TGI's" in complaint(capsys, *MODEL, flag, "1")
    assert f"{flag} is a flag of TGI's" in complaint(capsys, *MODEL, f"{flag}=1")
    assert f"{name.upper()} is set" in complaint(capsys, *MODEL, environ={name.upper(): "1"})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("kv_cache_dtype", "the tensorrt-llm engine has kv_cache_config: {dtype: …} in --trtllm-options"),
        ("cuda_graphs", "the tensorrt-llm engine has cuda_graph_config in --trtllm-options"),
        ("quantize", "the tensorrt-llm engine serves checkpoints that are quantised already, and needs no flag for it"),
    ],
)
def test_what_tensorrt_llm_has_instead_is_said(name: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, *MODEL, f"--{name.replace('_', '-')}", "fp8").endswith(f"does not have; {instead}\n")
    assert complaint(capsys, *MODEL, environ={name.upper(): "fp8"}).endswith(f"unset it; {instead}\n")


def test_where_there_is_nothing_instead_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, *MODEL, "--rope-scaling", "linear").endswith("does not have\n")


def test_what_a_refused_variable_holds_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hush" not in complaint(capsys, *MODEL, environ={"NGROK_AUTHTOKEN": "hush"})


def test_a_refused_variable_that_is_empty_does_not_count() -> None:
    read_config(MODEL, {"QUANTIZE": ""})


def test_vertex_says_which_port() -> None:
    assert read_config((*MODEL, "--port", "1"), {"AIP_HTTP_PORT": "8080"}).port == 8080


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ("--max-input-tokens", "5", "--max-input-length", "6"),
            "Both `max_input_tokens` (5) and `max_input_length` (6) are set. Please define only `max_input_tokens` as "
            "`max_input_length is deprecated for naming consistency.",
        ),
        (
            ("--max-input-tokens", "10", "--max-total-tokens", "10"),
            "`max_input_tokens`(10) must be < `max_total_tokens`(10)",
        ),
        (
            ("--max-input-length", "11", "--max-total-tokens", "10"),
            "`max_input_tokens`(11) must be < `max_total_tokens`(10)",
        ),
        (
            ("--max-total-tokens", "10", "--max-batch-total-tokens", "9"),
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 10 and 9",
        ),
        (("--num-shard", "0"), "`num_shard` cannot be < 1"),
        (("--num-replicas", "0"), "--num-replicas (or NUM_REPLICAS)"),
        (("--max-shard-restarts", "-1"), "--max-shard-restarts (or MAX_SHARD_RESTARTS)"),
        (("--port", "0"), "--port (or PORT)"),
        (("--port", "x"), "--port (or PORT)"),
        (("--validation-workers", "0"), "--validation-workers (or VALIDATION_WORKERS)"),
        (("--max-batch-size", "0"), "--max-batch-size (or MAX_BATCH_SIZE)"),
        (("--engine", "vllm"), "--engine (or ENGINE)"),
        (("--trtllm-launch", "srun"), "--trtllm-launch (or TRTLLM_LAUNCH)"),
        (("--num-sh", "1"), "unrecognized arguments: --num-sh 1"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(
    argv: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in complaint(capsys, *MODEL, *argv)


@pytest.mark.parametrize("keys", [",", " ", " , "])
def test_keys_that_are_none_do_not_open_the_server(
    keys: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", keys)
    assert "it contains no key" in complaint(capsys, *MODEL)
