"""Jobs: sessions that are named, or known by the prompt that they continue, in the whole scheduler."""

from __future__ import annotations

from scheduler_rig import Rig, a_policy, words

from text_generation_router.request import QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.jobs import MAX_PROMPTS, PrefixJobs
from text_generation_router.scheduling.sequence import ScheduledSequence

SYSTEM = words(1, 1500)


class Prompts:
    """Gives sequences to PrefixJobs."""

    def __init__(self) -> None:
        self.jobs = PrefixJobs()
        self.arrivals = 0

    def job(self, prompt: tuple[int, ...], tenant: str = "a", salt: str = "") -> str:
        self.arrivals += 1
        qos = QualityOfService(TenantId(tenant), salt=salt)
        request = Request(RequestId(self.arrivals), prompt, 1, qos=qos)
        return self.jobs.name(ScheduledSequence(request, self.arrivals, 0.0, 1))


def test_turns_of_a_session_belong_to_one_job_and_other_sessions_do_not() -> None:
    prompts = Prompts()
    first, other = (*SYSTEM, *words(2, 700)), (*SYSTEM, *words(3, 700))
    job, another = prompts.job(first), prompts.job(other)
    assert "" != job != another != ""
    assert prompts.job((*first, *words(4, 50))) == job
    assert prompts.job((*other, *words(4, 5000))) == another
    assert prompts.job((*first, *words(4, 50), *words(5, 3000))) == job
    assert prompts.job((*first, *words(6, 9))) == job, "a fork of the first prompt"


def test_a_shared_beginning_makes_no_job() -> None:
    prompts = Prompts()
    assert len({prompts.job((*SYSTEM, *words(number, 100))) for number in range(2, 12)}) == 10
    assert prompts.job(words(1, 1000)) == prompts.job(words(1, 1000)) == "", "short prompts have none"


def test_jobs_are_those_of_a_tenant_and_a_salt() -> None:
    prompts = Prompts()
    prompt = words(1, 3000)
    assert len({prompts.job(prompt), prompts.job(prompt, "b"), prompts.job(prompt, "b", "salt")}) == 3


def test_the_prompts_that_are_remembered_are_bounded() -> None:
    prompts = Prompts()
    rest = words(1, 1023)
    for number in range(MAX_PROMPTS + 10):
        prompts.job((number, *rest))
    assert len(prompts.jobs._prompts) == MAX_PROMPTS


def test_a_user_with_one_agent_is_served_beside_one_with_many() -> None:
    rig = Rig(a_policy(max_batch_size=1), blocks=400)
    for number in range(16):
        rig.submit(words(10 + number, 40), new=10, job="many")
    for number in range(3):
        rig.submit(words(40 + number, 40), new=10, job="few")
    rig.until_idle()
    assert sorted(rig.placed().index(number) for number in (16, 17, 18))[-1] <= 6


def test_a_job_with_a_target_for_its_first_token_goes_ahead_and_not_without_end() -> None:
    rig = Rig(a_policy(max_batch_size=1), blocks=2000)
    plain = [rig.submit(words(10 + number, 990), new=10, job=f"plain {number}") for number in range(2)]
    # They are due 15 s earlier than by their priority: that is worth 8,000 tokens.
    hurried = [rig.submit(words(20 + number, 990), new=10, job="hurried", first_token_by=45.0) for number in range(14)]
    rig.until_idle()
    order = [each for each in rig.placed() if each != plain[0]]
    assert order[0] in hurried
    assert 8 <= order.index(plain[1]) <= 10
