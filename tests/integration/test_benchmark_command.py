"""text-generation-benchmark as a process, against a plain server with a set pace."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificates
from http_stack import serve
from openai_mock import OpenAIMock, serve_mock

COMMAND = (sys.executable, "-m", "text_generation_bench.load")


async def benchmark(
    port: int, *flags: str, scheme: str = "http", stdout: int = asyncio.subprocess.PIPE
) -> tuple[int, str, str]:
    """Run the command; return its exit code, output and errors."""
    child = await asyncio.create_subprocess_exec(
        *COMMAND, "--url", f"{scheme}://127.0.0.1:{port}", *flags, stdout=stdout, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, (out or b"").decode(), err.decode()


def level(path: Path) -> dict[str, Any]:
    """Return the only level of a result file."""
    (found,) = json.loads(path.read_bytes())["levels"]
    assert isinstance(found, dict)
    return found


async def test_a_closed_loop_measures_the_pace_of_the_server(tmp_path: Path) -> None:
    output, report = tmp_path / "result.json", tmp_path / "report.html"
    async with serve_mock(OpenAIMock(ttft_s=0.1, itl_s=0.02, tokens_per_event=2)) as mock:
        code, out, err = await benchmark(mock.port, "--dialect", "openai", "-s", "30", "-d", "20", "-b", "4", "-r", "2",
                                         "--processes", "2", "--itl-target", "10", "-o", str(output), "--report", str(report))  # fmt: skip
    assert (code, err) == (0, "")
    assert len(mock.bodies) == 12, "four of the warm-up, eight that count"
    assert {(body["model"], len(body["prompt"]), body["max_tokens"]) for body in mock.bodies} == {
        ("mock-model", 30, 20)
    }
    found = level(output)
    assert (found["requests"], found["errors"], found["tokens"], found["prompt_tokens"]) == (8, 0, 160, 56)
    assert found["events_per_token"] == 0.5
    assert found["ttft"]["p50"] == pytest.approx(0.1, rel=0.2)
    assert found["itl"]["p50"] == pytest.approx(0.02, rel=0.2)
    assert found["tpot"]["p50"] == pytest.approx(9 * 0.02 / 19, rel=0.2)
    assert found["tokens_per_s"] == pytest.approx(4 * 20 / (0.1 + 9 * 0.02), rel=0.2)
    assert found["goodput"]["requests"] == 0
    rows = [line.split() for line in out.splitlines()]
    assert next(row for row in rows if row[0] == "4")[1:3] == ["8", "0"]
    assert "mock-model" in report.read_text(encoding="utf-8")


async def test_sessions_of_agents_end_with_the_duration(tmp_path: Path) -> None:
    """Else a session would be played to its end, with pauses of 2 s between dozens of turns."""
    async with serve_mock(OpenAIMock()) as mock:
        flags = ("--scenario", "agents", "-s", "2000", "-b", "2", "-w", "0", "--duration", "1", "--seed", "4")
        code, _, err = await benchmark(mock.port, "--dialect", "openai-chat", *flags, "-o", str(tmp_path / "result"))
    assert (code, err) == (0, "")
    assert level(tmp_path / "result")["seconds"] < 3


async def test_chats_over_tls_have_key_system_prompt_and_answers(tmp_path: Path) -> None:
    access = write_certificates(tmp_path, name="localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(access.shard_tls_cert, access.shard_tls_key)
    async with serve_mock(OpenAIMock(api_key="sesame"), tls) as mock:
        flags = [
            *("--dialect", "openai-chat", "-b", "2", "-r", "1", "-w", "0", "--turns", "2", "--system-length", "9"),
            *("-d", "2", "--header", "x-tenant: blue", "--insecure", "-o", str(tmp_path / "result")),
        ]
        code, _, err = await benchmark(mock.port, "--api-key", "sesame", *flags, scheme="https")
        assert (code, err) == (0, "")
        chats = [body["messages"] for body in mock.bodies]
        assert sorted(map(len, chats)) == [2, 2, 4, 4]
        assert len({chat[0]["content"] for chat in chats}) == 1
        long = next(chat for chat in chats if len(chat) == 4)
        assert long[:2] in chats
        assert long[2] == {"role": "assistant", "content": " word word"}
        assert {header["x-tenant"] for header in mock.headers} == {"blue"}
        assert "sesame" not in (tmp_path / "result").read_text()
        code, _, err = await benchmark(mock.port, *flags, scheme="https")
        assert (code, level(tmp_path / "result")["error_texts"]) == (1, {"401: Incorrect API key": 2})
        code, _, err = await benchmark(mock.port, "--tls-ca", str(tmp_path / "ca.pem"), scheme="https")
    assert code == 1
    assert err.startswith("text-generation-benchmark: error: no server at https://")
    assert "IP address mismatch" in err
    assert len(err.splitlines()) == 1


async def test_an_open_loop_keeps_its_times_and_errors_are_shown(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("".join(json.dumps({"timestamp": at / 10, "output_length": 40}) + "\n" for at in range(9)))
    async with serve_mock(OpenAIMock(itl_s=0.03, refuse=3)) as mock:
        code, out, err = await benchmark(mock.port, "--trace", str(trace), "-w", "0", "-o", str(tmp_path / "result"))
    assert (code, err) == (0, "")
    delays = [arrival - mock.arrivals[0] - at / 10 for at, arrival in enumerate(mock.arrivals)]
    assert min(delays) > -0.05, "none is before its time"
    assert max(delays) < 1, "none waits for the answers of others, which take 1.2 s"
    found = level(tmp_path / "result")
    assert (found["requests"], found["errors"], found["tokens"]) == (9, 3, 240)
    assert found["error_texts"] == {"429: Model is overloaded": 3}
    assert "trace: 3 × 429: Model is overloaded" in out


async def test_a_server_that_is_not_there_or_refuses_everything_is_one_line(unused_tcp_port: int) -> None:
    code, out, err = await benchmark(unused_tcp_port)
    line = f"text-generation-benchmark: error: no server at http://127.0.0.1:{unused_tcp_port}: Connection refused\n"
    assert (code, out, err) == (1, "", line)
    async with serve_mock(OpenAIMock(refuse=1)) as mock:
        code, _, err = await benchmark(mock.port, "-b", "2")
    line = "text-generation-benchmark: error: all 2 requests of the warm-up failed, the first with: 429: Model is overloaded\n"
    assert (code, err) == (1, line)


async def test_a_terminal_gets_a_live_view() -> None:
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            chunks.append(os.read(ours, 1 << 16))
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(ours)

    asyncio.get_running_loop().add_reader(ours, read)
    async with serve_mock(OpenAIMock(itl_s=0.02)) as mock:
        code, _, err = await benchmark(mock.port, "-b", "2", "-d", "30", "-r", "1", stdout=theirs)
    os.close(theirs)
    shown = b"".join(chunks).decode(errors="replace")
    assert (code, err) == (0, "")
    assert "\x1b[" in shown
    assert "2 open" in shown
    assert "2 warm-up" in shown
    assert "ev/tok" in shown


@pytest.mark.parametrize("dialect", ["responses", "anthropic"])
async def test_the_dialects_of_agents_are_measured_request_by_request(
    dialect: str, echo_model: Path, tmp_path: Path
) -> None:
    output, records = tmp_path / "result.json", tmp_path / "records.jsonl"
    async with serve(echo_model) as stack:
        code, out, err = await benchmark(stack.port, "--dialect", dialect, "-s", "40", "-d", "6", "-b", "2", "-r", "2", "--turns", "2",
                                         "--system-length", "20", "-o", str(output), "--records", str(records))  # fmt: skip
    assert (code, err) == (0, ""), out
    found = level(output)
    assert (found["errors"], found["tokens"], found["tokens_counted"]) == (0, 8 * 6, True)
    assert found["prompt_tokens"] > found["cached_tokens"] > 0
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(row["level"], row["tokens"], row["turn"]) for row in rows].count(("2", 6, 1)) == 4
    assert len(rows) == 8


async def test_the_result_names_the_servers_own_version(echo_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    async with serve(echo_model) as stack:
        code, out, err = await benchmark(
            *(stack.port, "--search-rate", "40", "--duration", "0.3", "--latency-target", "0.001", "-o", str(output))
        )
    assert (code, err) == (0, "")
    assert "no rate that was tried holds the targets" in out
    result = json.loads(output.read_bytes())
    assert result["server"]["server_version"] != result["server"]["version"]
    assert result["search"]["rate"] is None
    rates = [level["value"] for level in result["levels"]]
    assert rates == [40 / 2**number for number in range(len(rates))]
    assert result["search"]["fails_at"] == rates[-1]
