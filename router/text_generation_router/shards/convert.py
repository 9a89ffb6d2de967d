"""Conversion of orders to protobuf, and of reports from it."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import orjson

from text_generation_proto import convert
from text_generation_proto.copies import CopyEnd
from text_generation_proto.parts import field_head
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import FailureCode, TraceContext
from text_generation_router.request import LogprobJson, TenantId, TopToken
from text_generation_router.scheduling.messages import Placement, SchedulerOutput, StepOutput

NO_TRACE = TraceContext("")


def orders_to_pb(
    orders: SchedulerOutput,
    eos_token_ids: Sequence[int],
    *,
    own_cache: bool = False,
    shares_prompts: bool = False,
    files: dict[bytes, bytes] | None = None,
) -> pb.Orders:
    """Convert orders. `eos_token_ids` are the model's; `own_cache` is True if the engine keeps its own prefix cache.

    With `shares_prompts`, prompt, images and prediction of several sequences, which requests for several answers have,
    are sent once.
    `files`, if given, gets the data of images by digest, in place of the orders.
    """
    message = pb.Orders(number=orders.number, release=orders.release)
    eos = frozenset(eos_token_ids)
    places: dict[tuple[int, int, int], int] = {}
    for number, placement in enumerate(orders.placements, 1):
        first = number
        if shares_prompts and not placement.generated:
            request = placement.request
            first = places.setdefault((id(request.prompt), id(request.media), id(request.prediction)), number)
        prompt_of = 0 if first == number else first
        added = _add_sequence(message, placement, eos, own_cache=own_cache, prompt_of=prompt_of)
        for each in () if prompt_of else placement.request.media:
            media = added.media.add(offset=each.offset, tokens=each.tokens, digest=each.image.digest)
            if files is None:
                media.data = each.image.data
            else:
                files[each.image.digest] = each.image.data
    for slot, blocks in orders.allocations:
        message.allocation_slots.append(slot)
        message.allocation_counts.append(len(blocks))
        message.allocation_blocks.extend(blocks)
    for allocations in orders.further_allocations:
        group = message.further_allocations.add()
        for slot, blocks in allocations:
            group.slots.append(slot)
            group.counts.append(len(blocks))
            group.blocks.extend(blocks)
    for slot, tokens in orders.prefill:
        message.prefill_slots.append(slot)
        message.prefill_tokens.append(tokens)
    message.copies.extend(map(convert.copy_to_pb, orders.copies))
    return message


def _add_sequence(
    message: pb.Orders, placement: Placement, eos_token_ids: frozenset[int], *, own_cache: bool, prompt_of: int
) -> pb.NewSequence:
    """Add a placement without images to orders, where it is made: a long prompt is not copied."""
    request, generated = placement.request, len(placement.generated)
    stopping = pb.Stopping(
        max_new_tokens=request.max_new_tokens - generated,
        eos_token_ids=() if request.ignore_eos else eos_token_ids,
        stop_token_ids=request.stop_token_ids,
        min_new_tokens=max(0, request.min_new_tokens - generated),
    )
    # The prompt's log-probabilities are delivered before the first new token, so a resumed sequence has them.
    logprobs = request.logprobs.without_prompt() if generated else request.logprobs
    trace = request.trace or NO_TRACE
    sequence = message.placements.add(
        slot=placement.slot,
        prediction=() if prompt_of else request.prediction,
        prompt_of=prompt_of,
        generated_tokens=request.replayed or generated,
        blocks=placement.blocks,
        computed_tokens=placement.cached_tokens,
        further_blocks=[pb.GroupBlocks(first=first, blocks=blocks) for first, blocks in placement.further_blocks],
        sampling=convert.sampling_to_pb(request.sampling),
        stopping=stopping,
        logprobs=convert.logprobs_to_pb(logprobs),
        grammar=None if request.grammar is None else convert.grammar_to_pb(request.grammar),
        adapter=request.adapter,
        priority=request.qos.priority + 1 if own_cache else 0,
        cache_salt=hashed_salt(request.qos.salt) if own_cache and request.qos.salt else "",
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        draft_scope="" if own_cache else _draft_scope(request.qos.tenant, request.qos.salt),
        rank=0 if placement.rank is None else placement.rank + 1,
        no_drafts="drafts" in request.without,
    )
    if not prompt_of:
        # 100,000 numbers take 0.1 ms so, and 5 to 10 ms if they are given one by one.
        numbers = [
            part if isinstance(part, array) else array("I", part) for part in (request.prompt, placement.generated)
        ]
        head = field_head(pb.NewSequence, "prompt", 4 * sum(map(len, numbers)))
        sequence.MergeFromString(b"".join((head, *numbers)))
    return sequence


@lru_cache(maxsize=1024)
def _draft_scope(tenant: TenantId, salt: str) -> str:
    return hashed_salt(f"{tenant}\n{salt}") if tenant or salt else ""


def hashed_salt(salt: str) -> str:
    """Return a digest of a salt for the engine: a salt may name a tenant, and engines log requests.

    The digest has no key, so that a restarted router, or another one, finds the computed prompts again. It lets a reader
    of the log check a guessed name; API keys are already digests here.
    """
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").hexdigest()


class MalformedReport(Exception):
    """A report that breaks the contract; its shard is no longer trusted."""


def check_report(report: pb.StepReport, num_slots: int, orders_sent: int, unsent_slots: Set[int] = frozenset()) -> None:
    """Raise MalformedReport for inconsistencies that would corrupt the scheduler's state.

    `unsent_slots`: slots of sequences that the shard was not sent yet.
    """
    tokens = sum(report.token_counts) if report.token_counts else len(report.slots)
    finished = {item.slot for item in report.finished}
    topped = {item.slot for item in report.top_tokens}
    others = {item.slot for item in report.failed} | {item.slot for item in report.prompt_logprobs}
    others |= {item.slot for item in report.generated_scores}
    slots = set(report.slots)
    named = slots.union(report.prefilled_slots, report.cached_slots, others)
    if (
        (report.token_counts and len(report.token_counts) != len(report.slots))
        or tokens != len(report.token_ids)
        or len(report.logprobs) not in (0, tokens)
        or len(report.prefilled_slots) != len(report.prefilled_tokens)
        or len(report.cached_slots) != len(report.cached_tokens)
        or max(named, default=0) >= num_slots
        or not named.isdisjoint(unsent_slots)
        or any(finish.reason not in convert.FINISH_REASONS_FROM_PB for finish in report.finished)
        or not (finished <= slots and topped <= slots)
        or not all(_is_consistent(drafting, slots) for drafting in report.drafting)
        or report.orders_applied > orders_sent
    ):
        raise MalformedReport("malformed step report")


def _is_consistent(drafting: pb.Drafting, slots: Set[int]) -> bool:
    """Return True if the columns have the same length, and their slots are among those that got tokens."""
    columns = drafting.slots, drafting.slot_draft_tokens, drafting.slot_accepted_tokens
    return len({*map(len, columns)}) == 1 and slots >= set(drafting.slots)


def step_output_from_pb(report: pb.StepReport, steps: int) -> StepOutput:
    """Convert a report of `steps` steps; 0: it only acknowledges orders."""
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
        cached=list(zip(report.cached_slots, report.cached_tokens, strict=True)) if report.cached_slots else (),
        step_s=report.step_ns / 1e9 if steps else 0.0,
        steps=max(1, steps),
        copied=[CopyEnd(copied.number, tuple(copied.failed)) for copied in report.copied],
    )


def rank_outputs(output: StepOutput, ranks: int, num_slots: int) -> Sequence[StepOutput]:
    """Return the part of each of the `ranks` of an engine with `num_slots` slots in all; failures and ends are in all parts."""
    if ranks == 1:
        return [output]
    size, slots, counts = num_slots // ranks, np.array(output.slots, dtype=np.int64), np.array(output.token_counts)
    order = slots.argsort()
    starts = (counts.cumsum() - counts)[order] if output.token_counts else order
    bounds = slots[order].searchsorted(range(0, num_slots + 1, size))
    parts: list[StepOutput] = []
    for first, end in pairwise(bounds.tolist()):
        at, own = order[first:end], range(len(parts) * size, (len(parts) + 1) * size)
        parts.append(
            replace(
                output,
                slots=slots[at].tolist(),
                token_counts=counts[at].tolist() if output.token_counts else (),
                token_starts=starts[first:end].tolist(),
                prefilled=[each for each in output.prefilled if each[0] in own],
            )
        )
    return parts


def logprobs_to_json(logprobs: Sequence[float]) -> list[LogprobJson]:
    """Return each float32 as its shortest JSON text, NaN and infinities as null. Called once per step."""
    column = np.fromiter(logprobs, dtype=np.float32)
    return orjson.dumps(column, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",") if column.size else []


def top_tokens_by_position(report: pb.StepReport) -> Iterator[tuple[int, pb.TopTokens]]:
    """Yield the most probable tokens with their positions in the report's columns."""
    if not report.top_tokens:
        return
    counts = report.token_counts or [1] * len(report.slots)
    starts = dict(zip(report.slots, accumulate(counts, initial=0), strict=False))
    for top in report.top_tokens:
        yield starts[top.slot] + top.index, top


def top_tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[TopToken]:
    """Return the most probable tokens of a position, best first."""
    return list(zip(token_ids, logprobs_to_json(logprobs), strict=True))


def prompt_tops_from_pb(scored: pb.PromptLogprobs) -> Iterator[list[TopToken]]:
    """Yield the most probable tokens of each prompt position, best first; none if not requested.

    One after another: all together may take a hundred megabytes.
    """
    start = 0
    for count in scored.top_counts:
        end = start + count
        yield top_tokens(scored.top_token_ids[start:end], scored.top_logprobs[start:end])
        start = end
