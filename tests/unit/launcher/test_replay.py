"""The order of an audit's record is checked before a shard is started for it."""

import pytest

from text_generation_launcher.replay import order_problem
from text_generation_proto.v1 import shard_pb2 as pb

SCORED = pb.LogprobOptions(generated=True)


def an_order(**fields: object) -> pb.NewSequence:
    usual = {"prompt": (1, 2, 3), "generated_tokens": 1, "logprobs": SCORED, "stopping": pb.Stopping(max_new_tokens=1)}
    return pb.NewSequence(**usual | {"sampling": pb.Sampling(greedy=True)} | fields)


def test_an_order_that_a_shard_may_take_has_no_problem() -> None:
    assert order_problem(an_order(adapter="sql", grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a+"))) is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"generated_tokens": 3}, "generated_tokens must leave at least one prompt token"),
        ({"computed_tokens": 2}, "computed_tokens do not fit in the blocks given"),
        ({"stopping": pb.Stopping()}, "max_new_tokens must be at least 1"),
        ({"sampling": pb.Sampling(top_p=2.0)}, "top_p must be > 0.0 and < 1.0"),
        ({"prompt_of": 1}, "prompt_of 1 is not that of an earlier placement, or there is a prompt too"),
    ],
)
def test_an_order_that_no_shard_takes_has_one(fields: dict[str, object], problem: str) -> None:
    assert order_problem(an_order(**fields)) == problem
