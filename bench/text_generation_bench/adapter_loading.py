"""Longest pause of running sequences while LoRA adapters are loaded and come to their places on the device.

Steps run alone (quiet), while an adapter is read (reading), and with the first sequence of an adapter (placing); copying is the part
of those at their boundary, on a GPU the time to launch the copies.

python -m text_generation_bench.adapter_loading MODEL_FOLDER --load-format dummy --streams 64 --adapters 8 --rank 64

Half of the adapters have places, so that each one that comes takes the place of another.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_bench.random_adapters import write_adapters
from text_generation_common.lora import AdapterSource, parse_adapters
from text_generation_proto.values import Stopping, WarmUpLimits
from text_generation_shard.adapters import read_adapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, Orders
from text_generation_shard.engines import build_engine

QUIET_STEPS = 30
"""Steps without a change, before and between loads."""
PROMPT = 16


@dataclass
class LoadedEngine:
    """An engine with running sequences, and the times of its steps."""

    engine: Engine
    streams: int
    new_tokens: int
    orders: int = 0
    last: float = 0.0
    gaps: dict[str, list[float]] = field(default_factory=dict)

    def step(self, phase: str, *placements: NewSequence) -> None:
        """Run one step, and record the time since the one before."""
        self.orders += 1
        prefill = tuple((each.slot, PROMPT) for each in placements)
        started = time.perf_counter()
        self.engine.apply(Orders(number=self.orders, placements=placements, prefill=prefill))
        if phase == "placing":
            self.gaps.setdefault("copying", []).append(time.perf_counter() - started)
        self.engine.step()
        now = time.perf_counter()
        self.gaps.setdefault(phase, []).append(now - self.last)
        self.last = now

    def sequence(self, slot: int, new_tokens: int, adapter: str = "") -> NewSequence:
        each = -(-(PROMPT + self.new_tokens) // self.engine.info.block_size)
        blocks = tuple(range(slot * each, slot * each + each))
        return NewSequence(slot, (1,) * PROMPT, Stopping(max_new_tokens=new_tokens), blocks=blocks, adapter=adapter)

    def run(self, loads: Iterator[tuple[str, Iterator[None]]]) -> None:
        self.step("start", *(self.sequence(slot, self.new_tokens) for slot in range(self.streams)))
        for _ in range(QUIET_STEPS):
            self.step("quiet")
        for name, loading in loads:
            for _ in loading:
                self.step("reading")
            self.step("placing", self.sequence(self.streams, 2, name))
            for _ in range(QUIET_STEPS):
                self.step("quiet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new", type=int, default=2000)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = parse_adapters(write_adapters(Path(args.model), Path(folder), args.adapters, args.rank))
        config = ShardConfig(
            engine="torch",
            model_path=args.model,
            load_format=args.load_format,
            dtype=args.dtype,
            device=args.device,
            lora_modules_dir=folder,
            max_loras=max(1, args.adapters // 2),
            max_cpu_loras=args.adapters,
            max_lora_rank=args.rank,
        )
        engine = build_engine(config)
        engine.warm_up(WarmUpLimits())

        def loads() -> Iterator[tuple[str, Iterator[None]]]:
            for source in sources:
                adapter = read_adapter(AdapterSource(source.name, source.source), config)
                yield source.name, engine.set_adapter(source.name, adapter)

        load = LoadedEngine(engine, args.streams, args.new)
        load.run(loads())
        for phase, gaps in load.gaps.items():
            if phase != "start":
                mean, longest = sum(gaps) / len(gaps), max(gaps)
                print(f"{phase:8} {len(gaps):5} steps, mean {mean * 1e3:7.2f} ms, longest {longest * 1e3:7.2f} ms")
        engine.close()


if __name__ == "__main__":
    main()
