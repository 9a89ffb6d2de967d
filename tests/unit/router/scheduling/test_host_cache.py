"""The rules by which prefixes are stored on a host and loaded from there."""

from __future__ import annotations

from dataclasses import replace

from scheduler_checks import check_scheduler

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.copies import Copy, CopyEnd
from text_generation_proto.values import FinishReason
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.messages import ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler

BLOCK = 16
SPEC = ReplicaSpec(4, 64, BLOCK, host_cache="a", host_blocks=24)


class World:
    """A scheduler whose replicas compute a prompt in one step, and whose requests have one new token."""

    def __init__(self, *specs: ReplicaSpec) -> None:
        self.scheduler = Scheduler(Policy(4096, 8), len(specs))
        self.numbers = [0] * len(specs)
        self.requests = 0
        for replica, spec in enumerate(specs):
            self.scheduler.open(replica, spec)

    def submit(
        self, prompt: range, job: str = "", *without: str, ends: tuple[int, ...] = (), new: int = 1, adapter: str = ""
    ) -> None:
        self.requests += 1
        qos, number = QualityOfService(TenantId(""), job=job), RequestId(self.requests)
        request = Request(
            number, tuple(prompt), new, qos=qos, without=frozenset(without), turn_ends=ends, adapter=adapter
        )
        self.scheduler.submit(request, 0.0)
        self.scheduler.dispatch()

    def orders(self, replica: int = 0) -> SchedulerOutput:
        orders = self.scheduler.schedule(replica)
        assert orders is not None
        self.numbers[replica] = orders.number
        return orders

    def report(
        self, replica: int = 0, *copied: CopyEnd, prefilled: SchedulerOutput | None = None, ends: bool = True
    ) -> None:
        chunks = () if prefilled is None else prefilled.prefill
        slots = [slot for slot, _ in chunks]
        finished = dict.fromkeys(slots, FinishReason.LENGTH) if ends else {}
        tokens = [7] * len(slots)
        output = StepOutput(self.numbers[replica], slots, (), tokens, finished, prefilled=chunks, copied=copied)
        self.scheduler.update(replica, output, 0.0)
        check_scheduler(self.scheduler)

    def compute(self, prompt: range, replica: int = 0, job: str = "") -> list[Copy]:
        """Serve a request, and end the copies that follow; return these."""
        self.submit(prompt, job)
        self.report(replica, prefilled=self.orders(replica))
        made: list[Copy] = []
        while self.scheduler.may_have_orders(replica) and (orders := self.scheduler.schedule(replica)) is not None:
            self.numbers[replica] = orders.number
            made += orders.copies
            self.report(replica, *(CopyEnd(copy.number) for copy in orders.copies))
        return made


def test_a_prefix_is_stored_once_in_bounded_pieces() -> None:
    world = World(SPEC)
    stores = world.compute(range(200))
    assert [len(store.groups[0].host) for store in stores] == [8, 4], "an eighth of the device's blocks"
    assert not any(store.is_load for store in stores)
    assert [store.num_blocks for store in world.compute(range(240))] == [3], "only what is new"


def test_a_block_that_is_stored_again_has_a_new_tag() -> None:
    world = World(SPEC)
    tags: dict[int, int] = {}
    for first in range(0, 5000, 1000):
        for store in world.compute(range(first, first + 320), job="mine"):
            _, host, now = store.groups[0]
            assert not set(zip(host, now, strict=True)) & tags.items()
            tags |= zip(host, now, strict=True)
    assert len(tags) == 24, "all blocks were used, some for several prefixes"


def test_window_blocks_of_one_prefix_do_not_replace_each_other_without_end() -> None:
    window = CacheGroup(24, window=BLOCK, host_blocks=2)
    world = World(replace(SPEC, num_blocks=24, further_groups=(window,)))
    world.submit(range(200), "mine", ends=(40, 60, 75))
    world.report(0, prefilled=world.orders())
    world.submit(range(1000, 1300), "mine")  # it evicts the end of the first prompt before that is stored
    orders = world.orders()
    world.report(0, prefilled=orders)
    world.report(0, CopyEnd(orders.copies[0].number))
    stores = 0
    while world.scheduler.may_have_orders(0):
        orders = world.scheduler.schedule(0)
        if orders is not None:  # else the prefix that waited was stored already
            world.numbers[0] = orders.number
            world.report(0, *(CopyEnd(copy.number) for copy in orders.copies))
        stores += 1
        assert stores < 20


def test_a_prompt_is_stored_while_its_sequence_runs() -> None:
    world = World(replace(SPEC, num_blocks=22))
    world.submit(range(320), new=20)
    world.report(0, prefilled=world.orders(), ends=False)
    stored = 0
    while (orders := world.scheduler.schedule(0)) is not None:
        world.numbers[0] = orders.number
        stored += sum(copy.num_blocks for copy in orders.copies)
        world.report(0, *(CopyEnd(copy.number) for copy in orders.copies))
    assert stored == 20, "no block is left beside those of the sequence"


def test_a_one_off_prompt_displaces_nothing() -> None:
    world = World(SPEC)
    assert world.compute(range(320))
    assert not world.compute(range(1000, 1320)), "the host has only four free blocks"
    assert world.compute(range(2000, 2320), job="mine")
    assert world.compute(range(2000, 2340)), "it continues a cached prefix"


def test_a_long_one_off_prompt_displaces_nothing_and_its_next_turn_does() -> None:
    world = World(replace(SPEC, num_blocks=400, host_blocks=70))
    assert world.compute(range(1100)), "long enough to begin a job"
    assert not world.compute(range(5000, 6100))
    world.scheduler.lose(0)
    world.scheduler.open(0, replace(SPEC, num_blocks=400, host_blocks=70))
    assert world.compute(range(5000, 6120)), "it continues a prompt that is not cached any more"


def test_a_sequence_waits_for_its_load_and_others_run() -> None:
    world = World(SPEC)
    world.compute(range(200))
    world.scheduler.lose(0)
    world.scheduler.open(0, SPEC)
    world.submit(range(210))
    world.submit(range(300, 340))
    world.submit(range(5, 50))
    orders = world.orders()
    (load,) = orders.copies
    assert (load.is_load, load.num_blocks) == (True, 12)
    assert sorted(chunk for _, chunk in orders.prefill) == [40, 45], "the others"
    world.submit(range(220))
    world.report(0, prefilled=orders)
    world.report(0, CopyEnd(load.number))
    for cached in (192, 208):  # that of the second request waited
        world.scheduler.dispatch()
        orders = world.orders()
        assert [each.cached_tokens for each in orders.placements] == [cached]
        assert not any(copy.is_load for copy in orders.copies), "one load for both"
        world.report(0, prefilled=orders)


def test_a_failed_load_is_computed_and_forgotten() -> None:
    world = World(SPEC)
    world.compute(range(200))
    world.scheduler.lose(0)
    world.scheduler.open(0, SPEC)
    world.submit(range(210))
    (load,) = world.orders().copies
    world.report(0, CopyEnd(load.number, (9,)))
    world.scheduler.dispatch()
    (placement,) = world.orders().placements
    assert placement.cached_tokens == 0, "it tries no other load"
    (host,) = world.scheduler.host_caches
    assert host.free == 24
    assert world.scheduler.host_caches.figures["failed"] == 1


def test_a_request_without_the_host_cache_loads_and_stores_nothing() -> None:
    world = World(SPEC)
    world.submit(range(200), "", "offload")
    world.report(0, prefilled=world.orders())
    assert not world.scheduler.may_have_orders(0), "nothing is stored"
    assert world.compute(range(200))
    world.scheduler.lose(0)
    world.scheduler.open(0, SPEC)
    world.submit(range(210), "", "offload")
    orders = world.orders()
    assert (orders.copies, [chunk for _, chunk in orders.prefill]) == ((), [210])


def test_a_short_prefix_is_computed() -> None:
    world = World(SPEC)
    world.compute(range(60))
    world.scheduler.lose(0)
    world.scheduler.open(0, SPEC)
    world.submit(range(70))
    assert not world.orders().copies


def test_only_sequences_that_another_replica_can_hold_move_to_it() -> None:
    world = World(SPEC, replace(SPEC, num_blocks=8))
    world.scheduler.drain(1)
    world.submit(range(200))
    world.submit(range(300, 340))
    orders = world.orders()
    world.scheduler.drain(1, draining=False)
    world.scheduler.drain(0)
    world.scheduler.evacuate(0)
    world.report()
    (released,) = world.orders().release
    assert dict(orders.prefill)[released] == 40


def test_a_sequence_that_is_not_stored_ends_where_it_runs() -> None:
    world = World(SPEC, SPEC)
    world.scheduler.set_adapter("sql", (0, 1))
    world.scheduler.drain(1)
    world.submit(range(200), "", "offload")
    world.submit(range(300, 500), adapter="sql")
    orders = world.orders()
    world.scheduler.drain(1, draining=False)
    world.scheduler.drain(0)
    world.scheduler.evacuate(0)
    assert not world.scheduler.may_have_orders(0), "none is released"
    world.report(0, prefilled=orders)
    assert not world.scheduler.may_have_orders(0), "none is stored"


def test_a_sequence_that_moves_is_stored_although_blocks_are_scarce() -> None:
    world = World(replace(SPEC, num_slots=8, num_blocks=74), replace(SPEC, num_blocks=8))
    world.scheduler.drain(1)
    world.submit(range(300, 350))
    for number in range(1, 8):  # these fit on no other replica
        world.submit(range(1000 * number, 1000 * number + 140))
    orders = world.orders()
    small = next(each.slot for each in orders.placements if len(each.request.prompt) == 50)
    world.scheduler.update(0, StepOutput(orders.number, prefilled=[(small, 48)]), 0.0)
    world.scheduler.drain(1, draining=False)
    world.scheduler.drain(0)
    world.scheduler.evacuate(0)
    assert world.orders().release == (small,)
    world.report()
    (store,) = world.orders().copies
    world.scheduler.dispatch()
    assert not world.scheduler.may_have_orders(1), "it waits for its store"
    world.report(0, CopyEnd(store.number))
    world.scheduler.dispatch()
    (load,) = world.orders(1).copies
    assert (load.is_load, load.num_blocks) == (True, 3)


def test_a_sequence_moves_once_its_load_has_ended() -> None:
    world = World(SPEC, SPEC)
    world.scheduler.drain(1)
    world.compute(range(200))
    world.scheduler.lose(0)
    world.scheduler.open(0, SPEC)
    world.submit(range(210))
    (load,) = world.orders().copies
    world.scheduler.drain(1, draining=False)
    world.scheduler.drain(0)
    world.scheduler.evacuate(0)
    assert world.scheduler.serving[0].sequences, "its blocks are being written"
    world.report(0, CopyEnd(load.number))
    world.scheduler.evacuate(0)
    world.scheduler.dispatch()
    (placement,) = world.scheduler.serving[1].sequences
    assert placement.cached_tokens == 192


def test_replicas_share_the_cache_of_their_host_alone() -> None:
    world = World(SPEC, SPEC, replace(SPEC, host_cache="b"), replace(SPEC, host_cache="", host_blocks=0))
    world.scheduler.drain(1)
    world.scheduler.drain(2)
    world.scheduler.drain(3)
    world.compute(range(200))
    for replica in (1, 2, 3):
        world.scheduler.drain(replica - 1)
        world.scheduler.drain(replica, draining=False)
        world.submit(range(200 + replica))
        assert bool(world.orders(replica).copies) is (replica == 1)


def test_replicas_use_a_memory_for_the_same_contents_alone() -> None:
    old, new = (replace(SPEC, host_cache=f"a/{contents}") for contents in ("old", "new"))
    world = World(old, old)
    world.scheduler.drain(1)
    world.compute(range(200))

    def restart(replica: int, spec: ReplicaSpec, prompt: range) -> bool:
        """Let a replica serve again; return True if it loads the prefix of a prompt."""
        world.scheduler.lose(replica)
        world.scheduler.open(replica, spec)
        world.scheduler.drain(1 - replica)
        world.scheduler.drain(replica, draining=False)
        world.submit(prompt)
        orders = world.orders(replica)
        world.report(replica, *(CopyEnd(copy.number) for copy in orders.copies), prefilled=orders)
        return bool(orders.copies)

    assert not restart(0, new, range(210))
    assert world.scheduler.serving[0].cache.host is None, "the other one uses the memory"
    assert not restart(1, new, range(220)), "these are blocks of the old contents"
    (host,) = world.scheduler.host_caches
    assert (host.free, host.contents[0]) == (24, "a/new"), "a replica that is lost does not use it"
    assert not restart(0, new, range(230))
    world.report(0)
    assert world.scheduler.serving[0].cache.host is world.scheduler.serving[1].cache.host is host
    for replica in (0, 1):
        world.scheduler.lose(replica)
        world.scheduler.remove(replica)
    assert not list(world.scheduler.host_caches)
