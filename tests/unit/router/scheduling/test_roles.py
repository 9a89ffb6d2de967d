"""Two roles: where prompts are computed, and where sequences decode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_ledger import HostBlocks
from replica_world import BLOCK_SIZE, ReplicaSetup
from scheduler_world import SchedulerWorld

from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling import roles
from text_generation_router.scheduling.policy import Policy

PREFILL, DECODE = 0, 1


@pytest.fixture(autouse=True)
def _short_prompts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roles, "LEAST_PROMPT", 64)
        yield


class World(SchedulerWorld):
    """A replica that computes prompts, and others that decode."""

    def __init__(self, *, blocks: int = 40, slots: int = 4, host_blocks: int = 60, replicas: int = 2) -> None:
        setup = ReplicaSetup(blocks, slots, max_batch_size=slots, host=HostBlocks(host_blocks))
        super().__init__(Policy(64, slots, prefill_replicas=1), [setup] * replicas)

    def ask(self, first: int, length: int, new: int = 40) -> RequestId:
        prompt = tuple(range(first, first + length))
        request = Request(RequestId(len(self.views)), prompt, new, ignore_eos=True)
        self.submit(request)
        return request.id

    def round(self) -> None:
        super().round()
        self.check()

    def places(self, request: RequestId) -> list[int]:
        """Return the replicas on which a request is, one after another, until its end."""
        places: list[int] = []
        while request in self.live:
            self.round()
            if (sequence := self.scheduler.requests.get(request)) and sequence.slot >= 0:
                places += [] if places[-1:] == [sequence.replica] else [sequence.replica]
        return places


def test_a_long_prompt_is_computed_once_and_decodes_elsewhere() -> None:
    world = World()
    assert world.places(world.ask(100, 200)) == [PREFILL, DECODE]
    assert world.counts["hit tokens"] >= 200 // BLOCK_SIZE * BLOCK_SIZE
    world.finish()


def test_what_needs_little_prefill_stays_with_the_replicas_that_decode() -> None:
    world = World()
    assert world.places(world.ask(100, 60)) == [DECODE]
    world.places(world.ask(1000, 200))
    assert world.places(world.ask(1000, 230)) == [DECODE], "the next turn"
    assert world.places(world.ask(2000, 200, new=roles.LEAST_ANSWER)) == [PREFILL], "it ends before it could move"


def test_a_sequence_without_room_elsewhere_decodes_where_it_is() -> None:
    world = World(slots=1)
    decoding = world.ask(100, 20, new=200)
    for _ in range(5):
        world.round()
    assert world.places(world.ask(1000, 200)) == [PREFILL]
    assert decoding in world.live
    world = World(host_blocks=5)
    assert world.places(world.ask(1000, 200)) == [PREFILL], "the host has no room"
    world.finish()


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_the_other_role_does_the_work_of_one_that_is_lost(lost: int) -> None:
    world = World(replicas=2)
    running = [world.ask(1000 * number, 200, new=80) for number in range(1, 4)]
    while not all(world.views[each].tokens for each in running):
        world.round()
    world.lose(lost)
    assert set(world.places(world.ask(9000, 200))) == {1 - lost}
    for request in running:
        world.places(request)
    world.open(lost)
    assert world.places(world.ask(9500, 200)) == [PREFILL, DECODE]
    world.finish()
