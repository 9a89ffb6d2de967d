"""Domain values to protobuf and back; nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import orjson

from text_generation_proto import convert
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import FailureCode, GrammarKind
from text_generation_router.request import LogprobJson, Request, TopToken
from text_generation_router.scheduling.messages import Placement, SchedulerOutput, StepOutput


def orders_to_pb(orders: SchedulerOutput, eos_token_ids: Sequence[int], *, own_cache: bool = False) -> pb.Orders:
    """Orders as they go on the wire. `eos_token_ids` are the model's; `own_cache`: the engine keeps a prefix cache itself."""
    message = pb.Orders(number=orders.number, release=orders.release)
    message.admit.extend(
        _admission_to_pb(admission, eos_token_ids, own_cache=own_cache) for admission in orders.placements
    )
    for slot, blocks in orders.allocations:
        message.grant_slots.append(slot)
        message.grant_counts.append(len(blocks))
        message.grant_blocks.extend(blocks)
    for slot, tokens in orders.prefill:
        message.prefill_slots.append(slot)
        message.prefill_tokens.append(tokens)
    return message


def _admission_to_pb(admission: Placement, eos_token_ids: Sequence[int], *, own_cache: bool) -> pb.NewSequence:
    request: Request = admission.request
    message = pb.NewSequence(
        slot=admission.slot,
        prompt=request.prompt + admission.generated,
        generated_tokens=len(admission.generated),
        blocks=admission.blocks,
        computed_tokens=admission.cached_tokens,
        sampling=convert.sampling_to_pb(request.sampling),
        stopping=pb.Stopping(
            max_new_tokens=request.max_new_tokens - len(admission.generated),
            eos_token_ids=() if request.ignore_eos else eos_token_ids,
        ),
        logprobs=pb.LogprobOptions(
            top_n=request.logprobs.top_n,
            # What a preempted entry has delivered already is not asked for again.
            prompt=request.logprobs.prompt and not admission.generated,
        ),
    )
    # What few requests ask for is written only for those: the others' admissions stay as small and quick.
    if request.stop_token_ids:
        message.stopping.stop_token_ids.extend(request.stop_token_ids)
    if request.min_new_tokens > len(admission.generated):
        message.stopping.min_new_tokens = request.min_new_tokens - len(admission.generated)
    if request.logprobs.prompt_top_n and message.logprobs.prompt:
        message.logprobs.prompt_top_n = request.logprobs.prompt_top_n
    if request.grammar is not None:
        message.grammar.CopyFrom(convert.grammar_to_pb(request.grammar))
    if own_cache and request.qos.salt:
        message.cache_salt = hashed_salt(request.qos.salt)
    return message


def grammar_kinds_from_pb(kinds: Sequence[pb.GrammarKind.ValueType]) -> frozenset[GrammarKind]:
    """The grammars that an engine says it follows, as far as they are known here."""
    return frozenset(kind for kind, value in convert.GRAMMAR_KINDS_TO_PB.items() if value in kinds)


def hashed_salt(salt: str) -> str:
    """What an engine is told of a salt, which may name a tenant: engines log what they are asked.

    Without a key: the engine outlives the router, and what it has computed is to be found again after a restart of the
    router, and by another one beside it. A digest tells those who see it whether a name that they guess is the right one;
    API keys are digests before they get here.
    """
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").hexdigest()


class MalformedReport(Exception):
    """A report that breaks the contract: its shard is not to be believed any more."""


def check_report(report: pb.StepReport, num_slots: int, orders_sent: int) -> None:
    """Raises MalformedReport for what would not be found out before it had done harm."""
    tokens = sum(report.token_counts) if report.token_counts else len(report.slots)
    finished = {one.slot for one in report.finished}
    topped = {one.slot for one in report.top_tokens}
    others = {one.slot for one in report.failed} | {one.slot for one in report.prompt_logprobs}
    slots = set(report.slots)
    if (
        (report.token_counts and len(report.token_counts) != len(report.slots))
        or tokens != len(report.token_ids)
        or tokens != len(report.logprobs)
        or len(report.prefilled_slots) != len(report.prefilled_tokens)
        or max(slots.union(report.prefilled_slots, others), default=0) >= num_slots
        or any(one.reason not in convert.FINISH_REASONS_FROM_PB for one in report.finished)
        or not (finished <= slots and topped <= slots)
        or report.orders_applied > orders_sent
    ):
        raise MalformedReport("the shard sent a report that makes no sense")


def step_output_from_pb(report: pb.StepReport, steps: int) -> StepOutput:
    """What the scheduler needs of a report of so many steps; 0: it only says that orders were applied."""
    return StepOutput(
        orders_applied=report.orders_applied,
        slots=list(report.slots),
        token_counts=list(report.token_counts),
        token_ids=list(report.token_ids),
        finished={finish.slot: convert.FINISH_REASONS_FROM_PB[finish.reason] for finish in report.finished},
        failed={
            failure.slot: (convert.FAILURE_CODES_FROM_PB.get(failure.code, FailureCode.STEP), failure.message)
            for failure in report.failed
        },
        prefilled=list(zip(report.prefilled_slots, report.prefilled_tokens, strict=True)),
        step_s=report.step_ns / 1e9 if steps else 0.0,
        steps=max(1, steps),
    )


def logprobs_to_json(logprobs: Sequence[float]) -> list[LogprobJson]:
    """Each float32 as its shortest JSON text; NaN and infinities as null. One call for a whole step's tokens."""
    column = np.fromiter(logprobs, dtype=np.float32)
    return orjson.dumps(column, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",") if column.size else []


def top_tokens_from_pb(report: pb.StepReport) -> dict[int, list[TopToken]]:
    """Position of a token in the report's columns → the most probable tokens there, best first."""
    counts = report.token_counts or [1] * len(report.slots)
    starts = dict(zip(report.slots, accumulate(counts, initial=0), strict=False))
    return {
        starts[top.slot] + top.index: list(zip(top.token_ids, logprobs_to_json(top.logprobs), strict=True))
        for top in report.top_tokens
    }


def prompt_tops_from_pb(scored: pb.PromptLogprobs) -> list[list[TopToken]]:
    """The most probable tokens of each prompt position, best first; [] if they were not asked for."""
    pairs = list(zip(scored.top_token_ids, logprobs_to_json(scored.top_logprobs), strict=True))
    ends = list(accumulate(scored.top_counts))
    return [pairs[end - count : end] for end, count in zip(ends, scored.top_counts, strict=True)]
