"""Play random traffic against the scheduler until a promise is broken, or for so many events.

python -m text_generation_bench.soak_scheduler [--events 1000000] [--seed 0]

The promises are those of tests/property/test_scheduler_machine.py. A violation names the seed of the world in which it
happened and the number of the event there; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from world_traffic import play  # type: ignore[import-not-found]

EVENTS_A_WORLD = 1000
"""Then everything has to end, and another world begins: policies and replicas are drawn anew."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="how many events to play")
    parser.add_argument("--seed", type=int, default=0, help="where the random numbers begin")
    arguments = parser.parse_args()
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    played = 0
    world = arguments.seed << 32
    while played < arguments.events:
        events = min(EVENTS_A_WORLD, arguments.events - played)
        try:
            counts += play(world, events)
        except Exception:  # noqa: BLE001 - whatever it is, it is the finding
            traceback.print_exc()
            return 1
        played += events
        world += 1
    seconds = time.perf_counter() - started
    print(f"{played} events in {seconds:.0f} s, {played / seconds:.0f}/s, no violation")
    for what, count in sorted(counts.items()):
        print(f"{count:>10}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
