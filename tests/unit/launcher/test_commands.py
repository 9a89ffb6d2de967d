"""The commands of the launcher beside serving, and --print-config, as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from text_generation_common.exit_codes import ExitCode
from text_generation_launcher.commands import run
from text_generation_launcher.completion import completion_script

PROGRAM = "text-generation-launcher"
BARE = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
COMPLETE = {
    "bash": """
        source "$1"
        complete() { [[ $1 = -p ]] || command complete "$@"; }
        COMP_WORDS=({words}) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        COMP_LINE="${COMP_WORDS[*]}" COMP_POINT=${#COMP_LINE}
        _shtab_text_generation_launcher x "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "fish": "source $argv[1]; complete -C '{line}'",
    "zsh": """
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell "PROMPT=; autoload -U compinit; compinit -u -D; zstyle ':completion:*' insert-tab false"
        zpty -w shell "LISTMAX=10000; eval \\"\\$(cat $1)\\"; print re''ady"
        zpty -r -m shell out "*ready*"
        zpty -w -n shell $'{line}\\t\\C-aprint -r -- \\n'
        zpty -w shell exit
        while zpty -r shell out; do print -rn -- "$out"; done
    """,
}
"""Programs that print the completions of a line by a script."""


def launcher(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "text_generation_launcher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=BARE | environ, check=False)


@pytest.mark.parametrize("shell", COMPLETE)
def test_a_shell_completes_commands_flags_and_values(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "completion"
    script.write_text(completion_script(shell), encoding="utf-8")

    def completions(line: str) -> str:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        program = COMPLETE[shell].replace("{words}", words).replace("{line}", line)
        source = [program] if shell == "fish" else [program, shell]
        done = subprocess.run(
            [shell, "-c", *source, str(script)], capture_output=True, text=True, check=True, env=BARE, cwd=tmp_path
        )
        return done.stdout

    assert "check" in completions(f"{PROGRAM} ch")
    assert "--max-batch-size" in completions(f"{PROGRAM} --max-batch-s")
    assert "tensorrt-llm" in completions(f"{PROGRAM} --engine te")
    assert "--quantize" in completions(f"{PROGRAM} check /model --quan")
    assert "--memory" in completions(f"{PROGRAM} check /model --mem")
    assert "--json" in completions(f"{PROGRAM} check --js").replace("--json-output", "")
    (tmp_path / "a-folder").mkdir()
    assert "a-folder" in completions(f"{PROGRAM} check a-f")
    assert "a-folder" not in completions(f"{PROGRAM} env a-f")


def test_the_command_prints_the_script_of_a_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM, "completion", "bash"])
    run()
    assert capsys.readouterr().out == completion_script("bash")


@pytest.mark.parametrize(
    "arguments",
    [["completion", "ksh"], ["check", "--env"], ["check", "--print-config", "a"], ["check"], ["check", "a", "b"]],
)
def test_wrong_arguments_of_a_command_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM, *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err.count("\n"), shown.out) == (ExitCode.USAGE, 1, "")


def test_the_configuration_of_all_processes_with_sources_and_without_secrets(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken", encoding="ascii")
    flags = ["--model-id", str(tmp_path), "--engine", "echo", "--print-config", "--json-output", "--port", "1"]
    done = launcher(
        *flags,
        "--shard-token-file",
        str(token),
        API_KEY="k3y",
        MAX_BEST_OF="7",
        AIP_HTTP_PORT="8080",
        MAX_TOP_N_TOKENS="5",
    )
    assert done.returncode == 0
    assert "t0ken" not in done.stdout
    assert "k3y" not in done.stdout
    found = json.loads(done.stdout)
    assert found.keys() == {"launcher", "router", "shard-0"}
    assert found["router"]["max_best_of"] == {"value": 7, "source": "environment MAX_BEST_OF"}
    assert found["router"]["port"] == {"value": 8080, "source": "environment AIP_HTTP_PORT"}
    assert found["router"]["api_key"] == {"value": "***", "source": "environment API_KEY"}
    assert found["router"]["queue_timeout"] == {"value": 0.0, "source": "default"}
    assert found["shard-0"]["engine"] == {"value": "echo", "source": "flag"}
    assert found["shard-0"]["model_path"] == {"value": str(tmp_path), "source": "launcher"}
    assert found["shard-0"]["shard_token"] == {"value": "***", "source": "file of --shard-token-file"}
    assert found["router"]["max_top_n_tokens"] == {"value": 5, "source": "environment MAX_TOP_N_TOKENS"}
    refused = launcher(*flags, "--num-shard", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the echo engine has no model to split" in refused.stderr


@pytest.mark.parametrize("program", ["router", "shard"])
def test_router_and_shard_print_their_configuration(program: str) -> None:
    command = [sys.executable, "-m", f"text_generation_{program}", "--print-config", "--log-level=error"]
    done = subprocess.run(command, capture_output=True, text=True, env=BARE, check=True)
    assert ["log_level", '"error"', "flag"] in [line.split() for line in done.stdout.splitlines()]


SIGNAL_WHILE_IMPORTING = """
import os, signal, sys

module = sys.argv.pop(1)

class Signal:
    def __del__(self):  # an exception in it is printed and forgotten
        os.kill(os.getpid(), signal.SIGTERM)
        while True: pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            Signal()

sys.meta_path.insert(0, Finder())
from text_generation_launcher.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("text_generation_launcher.launch", ["--model-id", "/missing"], ExitCode.STOPPED),
        ("pydantic", ["--model-id", "/missing"], ExitCode.STOPPED),
        ("pydantic", ["check", "/missing"], -signal.SIGTERM),
    ],
)
def test_a_signal_that_arrives_during_an_import_ends_the_launcher(module: str, words: list[str], code: int) -> None:
    command = [sys.executable, "-c", SIGNAL_WHILE_IMPORTING, module, *words]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize(
    ("command", "content", "reason"),
    [
        (["check"], None, "No such file"),
        (["--print-config", "--model-id"], "keys = 5", "expected [[keys]] tables"),
        (["--model-id"], "[[keys]]\nkey = 'sk'\ntennant = 'a'\n", "tennant"),
    ],
)
def test_keys_that_cannot_be_read_are_found_before_the_model_is_loaded(
    command: list[str], content: str | None, reason: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    if content is not None:
        keys.write_text(content)
    done = launcher(*command, str(tmp_path), "--api-keys-file", str(keys), "--engine=echo", "--port=39999")
    assert done.returncode == (ExitCode.FAILED if command == ["check"] else ExitCode.USAGE)
    assert reason in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_template_that_cannot_be_parsed_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = launcher("--print-config", "--model-id", str(tmp_path), "--chat-template", "{% for", "--engine=echo")
    assert done.returncode == ExitCode.USAGE
    assert "chat template" in done.stdout + done.stderr


def test_sagemaker_starts_the_server_by_its_variables() -> None:
    variables = {"HF_MODEL_ID": "org/model", "HF_MODEL_REVISION": "main", "SM_NUM_GPUS": "1"}
    done = launcher("serve", "--engine=echo", "--print-config", "--json-output", **variables)
    assert done.returncode == ExitCode.STOPPED, done.stderr
    settings = json.loads(done.stdout)["launcher"]
    found = {name: (settings[name]["value"], settings[name]["source"]) for name in ("model_id", "revision", "port")}
    assert found["model_id"] == ("org/model", "environment HF_MODEL_ID")
    assert (found["revision"][0], found["port"][0]) == ("main", 8080)
