"""Checks of the services in the container. Each returns the figure for the table, or raises AssertionError, TimeoutError."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from container import Container, until

UNITS = ("text-generation@demo", "text-generation-router@front", "text-generation-shards@back")
DEMO, ROUTER, SHARDS = UNITS
THRESHOLD = 20
"""Highest exposure, in tenths."""
RESTART_S = 120.0
"""Longest wait for a restart. That it comes is asserted; how fast depends on the machine, and is printed."""
WATCHDOG_S = 6
LOAD_S = 300.0
"""Longest time of a start with torch on a busy machine."""
TOKENS = 60
STEP_MS = 50
ENV_FILE = "etc/text-generation/demo.env"
DROP_IN = "etc/systemd/system/text-generation{}@.service.d/watchdog.conf"
LABELLED = re.compile(r'^key = "(.*)"$', re.MULTILINE)


class Checks:
    """The checks, and the state of the services that they share."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._run = container.run

    # ------------------------------------------------------------------------------------------------- state of a unit

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self._run(f"systemctl show --value -p {name} '{unit}'").strip()

    def program(self, instance: str) -> str:
        """Return the path of the Python that runs the main process of an instance."""
        return self._run(
            f"readlink /proc/{self.show(f'text-generation@{instance}', 'MainPID')}/exe; "
            f"tr '\\0' ' ' < /proc/{self.show(f'text-generation@{instance}', 'MainPID')}/cmdline"
        )

    def _pids(self, unit: str) -> dict[int, str]:
        """Return the processes of a unit, with the times of their starts."""
        group = self.show(unit, "ControlGroup")
        script = f"for p in $(cat /sys/fs/cgroup/{{systemd,unified,.}}'{group}'/cgroup.procs 2>/dev/null | sort -u); do echo $p $(stat -c %Y /proc/$p); done"
        return {int(line.split()[0]): line.split()[1] for line in self._run(script).splitlines() if " " in line}

    def _main(self, unit: str) -> int:
        return int(self.show(unit, "MainPID"))

    def _child(self, unit: str, module: str) -> int:
        return int(self._run(f"pgrep --oldest --parent {self._main(unit)} --full 'm {module} '"))

    def _wait_for_restart(self, unit: str, restarts: int, timeout: float) -> float:
        def active() -> bool:
            return (
                int(self.show(unit, "NRestarts")) > restarts
                and self.show(unit, "ActiveState") == "active"
                and self._status_of("/health", 8081 if unit == ROUTER else 8080) == 200
            )

        return until(active, timeout, f"{unit} active again")

    def _wait_for_watchdog(self, unit: str, restarts: int) -> float:
        def restarted() -> bool:
            return int(self.show(unit, "NRestarts")) > restarts

        return until(restarted, 2 * WATCHDOG_S, f"{unit} restarted by the watchdog")

    # --------------------------------------------------------------------------------------------------------- requests

    @property
    def _key(self) -> str:
        return LABELLED.findall(self._run("cat /etc/text-generation/demo.keys.toml"))[0]

    def _status_of(self, path: str, port: int = 8080, key: str = "") -> int:
        header = f"-H 'Authorization: Bearer {key}'" if key else ""
        script = f"curl -s -o /dev/null -w '%{{http_code}}' {header} http://127.0.0.1:{port}{path}"
        return int(self._run(script, check=False) or 0)

    def _post(self, path: str, body: object, port: int = 8080) -> dict[str, object]:
        return dict(json.loads(self._run(self._curl(path, body, port))))

    def _curl(self, path: str, body: object, port: int = 8080) -> str:
        return (
            f"curl -sN http://127.0.0.1:{port}{path} -H 'Authorization: Bearer {self._key}' "
            f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        )

    def _generate(self, prompt: str, tokens: int, port: int = 8080, **parameters: object) -> str:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, **parameters}}
        return str(self._post("/generate", body, port)["generated_text"])

    # ----------------------------------------------------------------------------------------------------------- checks

    def units_are_clean(self) -> str:
        files = " ".join(f"/etc/systemd/system/{unit.partition('@')[0]}@.service" for unit in UNITS)
        assert self._run(f"systemd-analyze verify {files} 2>&1") == ""
        figures = []
        for unit in UNITS:
            rating = self._run(f"systemd-analyze security --offline=true --threshold={THRESHOLD} {unit}.service")
            figures.append(rating.split("service: ")[1].split()[0])
        warnings = self._run(
            "journalctl -b --no-pager _PID=1 -g 'etc/systemd/system/text-generation' -o cat", check=False
        )
        assert warnings == "", warnings
        return f"exposure {', '.join(figures)}"

    def torch_serves(self) -> str:
        info = json.loads(self._run(f"curl -s http://127.0.0.1:8080/info -H 'Authorization: Bearer {self._key}'"))
        assert info["model_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct", info
        assert "Paris" in self._generate("The capital of France is", 5)
        shard = self._child(DEMO, "text_generation_shard")
        assert "--engine torch" in self._run(f"tr '\\0' ' ' < /proc/{shard}/cmdline")
        user, no_privileges = self._run(f"stat -c %U /proc/{shard}; grep NoNewPrivs /proc/{shard}/status").split("\n")[
            :2
        ]
        assert (user, no_privileges.split()[1]) == ("text-generation", "1")
        return f"{info['model_id']} as user {user}"

    def keys_change(self, follow: Callable[[], object]) -> str:
        follow()
        until(lambda: self._status_of("/info", key="another-key") == 200, 10, "the new key is accepted")
        assert self._status_of("/info", key=self._key) == 200
        assert self._status_of("/info") == 401
        assert self.show(DEMO, "NRestarts") == "0"
        assert self._run("runuser -u daemon -- cat /var/lib/text-generation/demo/keys.toml 2>&1 || true").endswith(
            "Permission denied\n"
        )
        return "a reload adds a key"

    def parts_serve(self, follow: Callable[[], object]) -> str:
        follow()
        assert "Paris" in self._generate("The capital of France is", 5, port=8081)
        for unit in (ROUTER, SHARDS):
            assert self.show(unit, "StatusText") == "serving with 1 of 1 replicas"
        return f"both: {self.show(SHARDS, 'StatusText')}"

    def parts_use_tls(self, follow: Callable[[], object]) -> str:
        follow()
        assert "Paris" in self._generate("The capital of France is", 5, port=8081)
        token = self._run("cat /etc/text-generation/shard-token").strip()
        processes = [pid for unit in (ROUTER, SHARDS) for pid in self._pids(unit)]
        assert len(processes) >= 3, processes
        shown = self._run(
            f"for p in {' '.join(map(str, processes))}; do tr '\\0' '\\n' < /proc/$p/environ; tr '\\0' ' ' < /proc/$p/cmdline; done"
        )
        assert "SHARD_TLS_CERT=/run/credentials/" in shown
        assert token not in shown
        plain = self._run(
            "curl -s --http2-prior-knowledge --max-time 5 http://127.0.0.1:50051/ 2>&1 || echo refused", check=False
        )
        assert plain.endswith("refused\n"), plain
        return f"token in no argv and environment of {len(processes)} processes"

    def parts_return(self) -> str:
        self._watchdog("-router")
        self._run(f"systemctl restart '{ROUTER}'")
        self._run(f"kill -STOP {self._main(ROUTER)}")
        noticed = self._wait_for_watchdog(ROUTER, 0)
        self._wait_for_restart(ROUTER, 0, LOAD_S)
        shard = self._lose_shard(self._child(SHARDS, "text_generation_shard"))
        assert self.show(SHARDS, "NRestarts") == "0"
        launcher = self._lose_shard(self._main(SHARDS))
        assert (self.show(SHARDS, "NRestarts"), self.show(ROUTER, "NRestarts")) == ("1", "1")
        self._run("echo MAX_SHARD_RESTARTS=1 >> /etc/text-generation/back.env")
        self._run(f"systemctl restart '{SHARDS}'")
        self._kill_shards(SHARDS)
        self._stays_failed(76, SHARDS)
        self._run(f"systemctl disable --now '{ROUTER}' '{SHARDS}'")
        assert self.show(ROUTER, "Result") == "success"
        return f"ended after {noticed:.1f} s with WatchdogSec={WATCHDOG_S}; serving {shard:.1f}, {launcher:.1f} s after the kill; 76 stays"

    def _lose_shard(self, pid: int) -> float:
        """Kill a process of the shards' unit; return the seconds until the router serves again."""
        self._run(f"kill -KILL {pid}")
        until(lambda: self.show(ROUTER, "StatusText") != "serving with 1 of 1 replicas", 10, "the loss is shown")
        seconds = until(
            lambda: self.show(ROUTER, "StatusText") == "serving with 1 of 1 replicas", LOAD_S, "the shard is back"
        )
        assert "Paris" in self._generate("The capital of France is", 5, port=8081)
        return seconds

    def use_echo(self) -> None:
        """Let the service run the echo engine, with the keys of the credential and a short watchdog."""
        self._run("systemctl stop text-generation@demo")
        settings = f"MODEL_ID=/srv/models/SmolLM2-135M-Instruct\nENGINE=echo\nECHO_STEP_MS={STEP_MS}\nHOSTNAME=127.0.0.1\nPORT=8080\n"
        self._settings(settings)
        self._watchdog("")

    def _watchdog(self, kind: str) -> None:
        path = self._container.root / DROP_IN.format(kind)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
        self._run("systemctl daemon-reload")

    def _settings(self, text: str) -> str:
        path: Path = self._container.root / ENV_FILE
        before = path.read_text() if path.exists() else ""
        path.write_text(text)
        return before

    def start_is_ready(self) -> str:
        begin = time.monotonic()
        script = (
            "systemctl start text-generation@demo; curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/health"
        )
        assert self._run(script) == "200"
        seconds = time.monotonic() - begin
        assert self.show(DEMO, "StatusText") == "serving with 1 of 1 replicas"
        return f"{seconds:.1f} s; {self.show(DEMO, 'StatusText')}"

    def key_is_hidden(self) -> str:
        key = self._key
        assert (self._status_of("/info"), self._status_of("/info", key=key)) == (401, 200)
        processes = self._pids(DEMO)
        assert len(processes) >= 3, processes
        shown = b""
        for name in ("cmdline", "environ"):
            for pid in processes:
                shown += self._run(f"tr '\\0' '\\n' < /proc/{pid}/{name}").encode()
        assert b"MODEL_ID=" in shown
        assert key.encode() not in shown
        assert key not in self._run("systemctl show text-generation@demo")
        assert key not in self._run("journalctl -b --no-pager -u text-generation@demo")
        refused = self._run("runuser -u daemon -- ls /run/credentials/text-generation@demo.service 2>&1 || true")
        assert "Permission denied" in refused, refused
        return f"{len(processes)} processes"

    def workers_are_confined(self) -> str:
        assert re.fullmatch("[0-9]+", self._generate("a", 5, grammar={"type": "regex", "value": "[0-9]+"}))
        chat = {"model": "tgi", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        assert "choices" in self._post("/v1/chat/completions", chat)
        assert (
            self._run("journalctl -b -o cat --no-pager -u text-generation@demo -g 'not fully confined'", check=False)
            == ""
        )
        filters = {
            pid: int(self._run(f"sed -n 's/^Seccomp_filters:\\t//p' /proc/{pid}/status"))
            for pid in (self._main(DEMO), *map(int, self._run("pgrep --full sandbox.worker").split()))
        }
        launcher, *workers = filters.values()
        assert workers
        assert all(count == launcher + 1 for count in workers), filters
        return f"{len(workers)} workers with one filter more than the launcher"

    def stop_drains(self) -> str:
        before = self._pids(DEMO)
        body = {"inputs": "one two three", "parameters": {"max_new_tokens": TOKENS}}
        stream = self._container.start(self._curl("/generate_stream", body))
        assert stream.stdout is not None
        first = stream.stdout.readline()
        self._run("systemctl stop --no-block text-generation@demo")
        until(lambda: self.show(DEMO, "StatusText") == "draining", 5, "the status is draining")
        events = [line for line in (first, *stream.stdout) if line.startswith("data:")]
        assert stream.wait(60) == 0
        assert len(events) == TOKENS, len(events)
        assert json.loads(events[-1].removeprefix("data:"))["generated_text"]
        until(lambda: self.show(DEMO, "ActiveState") == "inactive", 30, "stopped")
        assert self.show(DEMO, "Result") == "success"
        assert not self._alive(before)
        return f"{len(events)} of {TOKENS} tokens, Result=success"

    def _alive(self, processes: dict[int, str]) -> list[int]:
        script = "for p in {}; do [ -e /proc/$p ] && echo $p $(stat -c %Y /proc/$p); done; true"
        lines = self._run(script.format(" ".join(map(str, processes)))).splitlines()
        return [int(line.split()[0]) for line in lines if processes[int(line.split()[0])] == line.split()[1]]

    def survives_kill(self) -> str:
        self._run("systemctl start text-generation@demo")
        before, restarts = self._pids(DEMO), int(self.show(DEMO, "NRestarts"))
        self._run(f"kill -KILL {self._main(DEMO)}")
        seconds = self._wait_for_restart(DEMO, restarts, RESTART_S)
        assert not self._alive(before), self._alive(before)
        assert len(self._pids(DEMO)) == len(before), before
        return f"{seconds:.1f} s, none of {len(before)} old processes left"

    def watchdog_restarts(self) -> str:
        restarts = int(self.show(DEMO, "NRestarts"))
        self._run(f"kill -STOP {self._main(DEMO)}")
        seconds = self._wait_for_watchdog(DEMO, restarts)
        self._wait_for_restart(DEMO, restarts, RESTART_S)
        stacks = self._run("journalctl -b -o cat --no-pager -u text-generation@demo -g 'Current thread'", check=False)
        assert stacks
        return f"ended after {seconds:.1f} s with WatchdogSec={WATCHDOG_S}, stacks in the journal"

    def router_that_cannot_live_restarts(self) -> str:
        """Without restarts by the launcher its death ends the launcher with 75, and systemd restarts the service."""
        before = self._settings("")
        self._settings(f"{before}MAX_SHARD_RESTARTS=0\n")
        self._run("systemctl reset-failed text-generation@demo || true; systemctl restart text-generation@demo")
        restarts = int(self.show(DEMO, "NRestarts"))
        self._run(f"kill -KILL {self._child(DEMO, 'text_generation_router')}")
        seconds = self._wait_for_restart(DEMO, restarts, RESTART_S)
        log = self._run("journalctl -b -o cat --no-pager _PID=1 -u text-generation@demo -g status=75")
        assert "status=75" in log
        self._settings(before)
        return f"{seconds:.1f} s"

    def _stays_failed(self, code: int, unit: str = DEMO) -> str:
        until(lambda: self.show(unit, "ActiveState") == "failed", 60, "failed")
        time.sleep(3)  # three times RestartSec: a restart would have begun
        assert self.show(unit, "ActiveState") == "failed"
        assert (self.show(unit, "ExecMainStatus"), self.show(unit, "NRestarts")) == (str(code), "0")
        self._run(f"systemctl reset-failed '{unit}'")
        return "failed, NRestarts=0"

    def usage_error_stays(self) -> str:
        self._run("systemctl stop text-generation@demo; systemctl reset-failed text-generation@demo || true")
        before = self._settings("PORT=none\n")
        self._run("systemctl start text-generation@demo", check=False)
        result = self._stays_failed(2)
        self._settings(before)
        return result

    def hopeless_stays(self) -> str:
        before = self._settings("")
        self._settings(f"{before}MAX_SHARD_RESTARTS=1\n")
        self._run("systemctl start text-generation@demo")
        self._kill_shards(DEMO)
        result = self._stays_failed(76)
        self._settings(before)
        return result

    def errors_have_their_priority(self) -> str:
        """`journalctl -p err` shows the errors of all processes, and nothing else of them."""

        def lines(option: str) -> list[str]:
            script = f"journalctl -b -o json --no-pager -u text-generation@demo {option}"
            entries = map(json.loads, self._run(script).splitlines())
            return [entry["MESSAGE"] for entry in entries if entry["_TRANSPORT"] == "stdout"]

        everything, errors = lines(""), lines("-p err")
        assert any("giving up: no shard serves" in line for line in errors), errors
        assert all(line.startswith(("[error ", "[critical ")) for line in errors), errors
        assert [line for line in everything if line.startswith(("[error ", "[critical "))] == errors
        assert any(line.startswith("[info ") for line in everything), everything
        return f"{len(errors)} of {len(everything)} lines"

    def _kill_shards(self, unit: str) -> None:
        """Kill the shard of a launcher, and its successor before that has served for long."""
        script = f"pgrep --oldest --parent {self._main(unit)} --full 'm text_generation_shard '"
        killed: list[str] = []

        def runs() -> bool:
            return self._run(script, check=False).strip() not in ("", *killed)

        for _ in range(2):
            until(runs, 30, "the shard runs")
            killed.append(self._run(script).strip())
            self._run(f"kill -KILL {killed[-1]}")

    def survives_reboot(self) -> str:
        self._run("systemctl start text-generation@demo")
        begin = time.monotonic()
        self._container.reboot()
        until(lambda: self.show(DEMO, "ActiveState") == "active", 60, "active after the reboot")
        assert self._generate("a b c", 3)
        return f"{time.monotonic() - begin:.0f} s from the command to an answer"
