"""The step trace: timings of each step, one JSON object per line, as docs/gpu.md explains them.

Host times and gap are missing in the first step after a pause.
"""

import time
from pathlib import Path

import orjson

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.device.copies import DeviceEvent
from text_generation_shard.step.sequence import StepRows


class StepTrace:
    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb")  # noqa: SIM115 – closed by `close`
        except OSError as error:
            raise EngineError(f"the trace of steps cannot be written: {error}") from None
        self._step = 0
        self._busy_since: tuple[int, int] | None = None
        """Start of the host interval: (perf_counter_ns, thread_time_ns)."""
        self._end: DeviceEvent | None = None
        self._busy_ns: tuple[int, int] | None = None

    def before_wait(self) -> None:
        """End the host interval: the engine starts to wait for the tokens of a step."""
        if self._busy_since is not None:
            wall, own = self._busy_since
            self._busy_ns = time.perf_counter_ns() - wall, time.thread_time_ns() - own

    def after_wait(self, rows: StepRows, started: DeviceEvent, ended: DeviceEvent) -> None:
        """Write the line of a finished step and start the next host interval."""
        self._step += 1
        busy = self._busy_ns
        line: dict[str, object] = {
            "step": self._step,
            "kind": "prefill" if rows.prefills else "decode",
            "rows": len(rows),
            "tokens": rows.tokens,
            "device_us": ended.ns_since(started) / 1000,
        }
        if busy is not None:
            line["wall_us"], line["host_us"] = busy[0] / 1000, busy[1] / 1000
        if self._end is not None:
            line["gap_us"] = started.ns_since(self._end) / 1000
        self._file.write(orjson.dumps(line) + b"\n")
        self._busy_since = time.perf_counter_ns(), time.thread_time_ns()
        self._end = ended

    def pause(self) -> None:
        """Mark a pause: there is nothing to compute."""
        self._busy_since = self._busy_ns = self._end = None
        self._file.flush()

    def close(self) -> None:
        self._file.close()
