"""Coding agents with the settings of docs/agents.md: a session of four questions, each with a tool call if it has tools.

The engine's answers are a script, so that an agent works as it does with a model that calls its tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from client_environments import Environment, npm_installed
from http_stack import LIMITS, serve
from scripted_engine import ScriptedEngine
from structlog.testing import capture_logs
from tokenizers import Tokenizer

pytestmark = [pytest.mark.system, pytest.mark.full]

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
FILE = re.compile(r"^[^\n]*`((?:~/)?[\w./-]+\.\w+)`[^\n]*:\n\n```(?!sh)\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
"""A file on the page: a line that names it, then its text."""
PLACE = "http://127.0.0.1:3000"
CONTEXT = 131072
QUESTIONS = 4
SAYS = "sunny in Paris"
"""The output of the tool."""
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call one with <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that knows tools, as those of Qwen do."""


@dataclass(frozen=True)
class Agent:
    """An agent, its tool for shell commands, and its command lines."""

    heading: str
    """Its section of the page."""
    install: Callable[[], Path]
    tool: str
    arguments: dict[str, object]
    first: Sequence[str]
    """Arguments of the first question, which follows them."""
    more: Sequence[str] = ()
    """Arguments of the further questions, in the same session; none: all questions come on standard input."""


SHELL = {"command": f"echo {SAYS}"}
CLAUDE = Agent(
    "Claude Code",
    partial(npm_installed, "@anthropic-ai/claude-code@2.1.197", "claude"),
    "Bash",
    {**SHELL, "description": "Look out"},
    ["--dangerously-skip-permissions", "-p"],
    ["--dangerously-skip-permissions", "-c", "-p"],
)
CODEX = Agent(
    "Codex",
    partial(npm_installed, "@openai/codex@0.169.0", "codex"),
    "exec_command",
    {"cmd": f"echo {SAYS}"},
    ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    ["exec", "resume", "--skip-git-repo-check", "--last", "--dangerously-bypass-approvals-and-sandbox"],
)
AGENTS = [
    CLAUDE,
    CODEX,
    Agent(
        "opencode",
        partial(npm_installed, "opencode-ai@1.18.33", "opencode"),
        "bash",
        {**SHELL, "description": "Look out"},
        ["run"],
        ["run", "-c"],
    ),
    Agent(
        "Qwen Code",
        partial(npm_installed, "@qwen-code/qwen-code@0.15.10", "qwen"),
        "run_shell_command",
        {**SHELL, "description": "Look out", "is_background": False},
        ["-y", "-p"],
        ["-y", "-c", "-p"],
    ),
    Agent(
        "Continue",
        partial(npm_installed, "@continuedev/cli@1.5.47", "cn"),
        "Bash",
        SHELL,
        ["--config", "~/.continue/config.yaml", "--auto", "-p"],
        ["--config", "~/.continue/config.yaml", "--auto", "--resume", "-p"],
    ),
    Agent(
        "aider",
        lambda: Environment("aider", ["aider-chat==0.86.2"]).installed() / "aider",
        "",
        {},
        ["--yes-always", "--no-gitignore", "--no-pretty", "weather.py"],
    ),
]


def settings(agent: Agent, url: str, home: Path, project: Path) -> dict[str, str]:
    """Write the files that the page has for an agent; return its variables."""
    section = PAGE[PAGE.index(f"\n## {agent.heading}\n") + 1 :].partition("\n## ")[0].replace(PLACE, url)
    for name, text in FILE.findall(section):
        path = home / name.removeprefix("~/") if name.startswith("~") else project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    scripts = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    given = dict(re.findall(r"(\w+)=(\S+)", " ".join(scripts)))
    assert url in section
    # As root Claude Code skips permissions only where it is told that nothing can be harmed.
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "IS_SANDBOX": "1", **given}


async def run(command: Sequence[str | Path], environ: dict[str, str], project: Path, asked: str = "") -> None:
    """Run an agent to its end."""
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(180):
            said, _ = await process.communicate(asked.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()


@pytest.mark.parametrize(
    ("agent", "template"),
    [*((agent, TEMPLATE) for agent in AGENTS), (CLAUDE, None), (CODEX, None)],
    ids=lambda value: value.heading if isinstance(value, Agent) else "without tools" if value is None else "tools",
)
async def test_a_session(agent: Agent, template: str | None, demo_model: Path, tmp_path: Path) -> None:
    """No request fails, and all but the newest part of a prompt is found in the prefix cache.

    Also with a chat template that knows no tools, where TGI's text describes them.
    """
    command = agent.install()
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "weather.py").write_text("".join(f"DAY_{day} = 'rain, {day} mm'\n" for day in range(400)))
    call = {"name": agent.tool, "arguments" if template else "parameters": agent.arguments}
    said = json.dumps(call) if template is None else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def answer(prompt: str) -> str:
        _, asked, since = prompt.rpartition("QUESTION ")
        calls = agent.tool and f'"{agent.tool}"' in prompt and asked and "<|im_start|>tool" not in since
        return said if calls else "Done."

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    limits = replace(LIMITS, max_input_tokens=CONTEXT - 1, max_total_tokens=CONTEXT)
    with capture_logs() as records:
        async with serve(
            demo_model,
            limits=limits,
            chat_template=template,
            pool_tokens=4 * CONTEXT,
            build=lambda config: ScriptedEngine.build_with(config, tokenizer, answer),
            echo_max_sequence_length=CONTEXT,
        ) as stack:
            environ = settings(agent, f"http://127.0.0.1:{stack.port}", home, project)
            questions = [f"QUESTION {number}: look out, how is the weather?" for number in range(QUESTIONS)]
            first = [str(command), *(part.replace("~", str(home)) for part in agent.first)]
            if agent.more:
                more = [str(command), *(part.replace("~", str(home)) for part in agent.more)]
                for number, question in enumerate(questions):
                    await run([*(more if number else first), question], environ, project)
            else:
                await run(first, environ, project, "\n".join(questions) + "\n")
            assert isinstance(stack.engine, ScriptedEngine)
            prompts = stack.engine.prompts
    requests = [record for record in records if record["event"] == "request finished"]
    assert [record for record in requests if record["status"] >= 400] == []
    # Others are about something else: a title for the session.
    turns = [record for record in requests if record.get("prompt_tokens", 0) > 1500]
    assert len(turns) == (2 * QUESTIONS if agent.tool else QUESTIONS)
    for before, after in pairwise(turns):
        assert after["cached_tokens"] >= 0.95 * before["prompt_tokens"]
    if agent.tool:
        results = prompts[-1].split("<|im_start|>tool")[1:]
        assert len(results) == QUESTIONS
        assert all(SAYS in result for result in results)
