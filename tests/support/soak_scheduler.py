"""Run random traffic against the scheduler for a number of events, with the checks of the property tests.

python tests/support/soak_scheduler.py [--events 1000000] [--seed 0]

On a violation the exit code is 1, and the traceback names the seed of the world and the number of the event.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from world_traffic import play

EVENTS_PER_WORLD = 1000
"""After them all requests must end, and a new world starts with other policies and replicas."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="number of events")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    played = 0
    world = arguments.seed << 32
    while played < arguments.events:
        events = min(EVENTS_PER_WORLD, arguments.events - played)
        try:
            counts += play(world, events).counts
        except Exception:  # noqa: BLE001 - any exception is a finding
            traceback.print_exc()
            return 1
        played += events
        world += 1
    seconds = time.perf_counter() - started
    print(f"{played} events in {seconds:.0f} s, {played / seconds:.0f}/s, no violation")
    for name, count in sorted(counts.items()):
        print(f"{count:>10}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
