"""What the work of requests will probably be, and how long it will take: measured so far, foreseen from there."""

from __future__ import annotations

from collections.abc import Sequence

from text_generation_router.request import Request, TenantId
from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.entry import Entry
from text_generation_router.scheduling.lengths import OutputLengths
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.throughput import Throughput, foreseen_wait


class Foresight:
    """Output lengths, and the pace of each replica."""

    def __init__(self, replicas: int) -> None:
        self.lengths = OutputLengths()
        self._throughputs = [Throughput() for _ in range(replicas)]

    def served(self, replica: int, now: float, tokens: int, seconds: float, *, queued: bool) -> None:
        """A replica got so many tokens of work done in so long; `queued`: while others waited."""
        self._throughputs[replica].record(now, tokens, seconds, queued=queued)

    def wait(
        self, queue: FairQueue[Entry], tenant: TenantId, batches: Sequence[Batch], now: float, *, full: bool
    ) -> float | None:
        """Seconds that a request of `tenant` which came now would wait; None: nothing is known yet. `full`: no replica
        has room.

        What waits before it, over what the replicas are measured to get done. That is the whole queue, or what its own
        tenant has in it at that tenant's share of the replicas, whichever is over sooner.
        """
        rates = [self._throughputs[batch.replica].rate(now) for batch in batches]
        if work := queue.work():
            return foreseen_wait(min(work, queue.work(tenant) / queue.share(tenant)), rates)
        if not full:
            return 0.0
        # Somebody has to end first.
        running = sum(batch.held for batch in batches)
        return foreseen_wait(sum(max(0, batch.work) for batch in batches) / max(1, running), rates)

    def is_overfull(self, queue: FairQueue[Entry], most: int | None, request: Request) -> bool:
        """Whether `request` is one too many: more than `most` tokens of work would wait. A tenant that has less than its
        share of the queue is not turned away for others' work."""
        if most is None or not len(queue):
            return False
        work = len(request.prompt) + self.lengths.expected(request.max_new_tokens)
        if queue.work() + work <= most:
            return False
        tenant = request.qos.tenant
        return queue.work() + work > 2 * most or queue.work(tenant) + work > most * queue.share(tenant)
