"""Conversion of orders from protobuf, and of reports to it."""

from array import array
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from itertools import islice

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from text_generation_proto import convert
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import TraceContext
from text_generation_shard.engine import EngineInfo, Media, NewSequence, Orders, Scheduling, StepResult

_SCHEDULING = {Scheduling.STEP: pb.SCHEDULING_STEP, Scheduling.SELF: pb.SCHEDULING_SELF}


class InvalidOrders(ValueError):
    """Orders with columns that contradict each other."""


def orders_from_pb(message: pb.Orders) -> Orders:
    """Convert orders. Raises InvalidOrders if columns that belong together differ in length."""
    if len(message.prefill_slots) != len(message.prefill_tokens):
        raise InvalidOrders("prefill_slots and prefill_tokens differ in length")
    placements, further = list[NewSequence](), message.further_allocations
    for sequence in message.placements:
        placements.append(_new_sequence(sequence, placements))
    return Orders(
        number=message.number,
        release=tuple(message.release),
        placements=tuple(placements),
        allocations=_allocations(message.allocation_slots, message.allocation_counts, message.allocation_blocks),
        prefill=tuple(zip(message.prefill_slots, message.prefill_tokens, strict=True)),
        further_allocations=tuple(_allocations(each.slots, each.counts, each.blocks) for each in further),
        copies=tuple(convert.copy_from_pb(copy) for copy in message.copies),
    )


def _allocations(
    slots: Sequence[int], counts: Sequence[int], blocks: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if len(slots) != len(counts):
        raise InvalidOrders("allocation_slots and allocation_counts differ in length")
    if sum(counts) != len(blocks):
        raise InvalidOrders("allocation_counts do not add up to allocation_blocks")
    left = iter(blocks)
    return tuple((slot, tuple(islice(left, count))) for slot, count in zip(slots, counts, strict=True))


def _prompt(message: pb.NewSequence) -> Sequence[int]:
    """Return the prompt of a sequence. A message without fields keeps it as bytes: 100,000 ids take 0.1 ms so, and 4 ms one by one."""
    if message.media:  # whose data would be copied
        return array("I", message.prompt[:])
    unknown = UnknownFieldSet(Empty.FromString(message.SerializeToString()))
    fields = map(unknown.__getitem__, range(len(unknown)))
    values = (each.data for each in fields if each.field_number == message.PROMPT_FIELD_NUMBER)
    # A prompt of another type is an unknown field of the sequence, too, and no bytes.
    return array("I", b"".join(value for value in values if isinstance(value, bytes)))


def _new_sequence(message: pb.NewSequence, before: Sequence[NewSequence]) -> NewSequence:
    """Convert a sequence; `before` are those before it in the orders."""
    number, own = message.prompt_of, message.prompt or message.media or message.prediction
    if number > len(before) or (number and own):
        raise InvalidOrders(f"prompt_of {number} is not that of an earlier placement, or there is a prompt too")
    first = before[number - 1] if number else None
    media = tuple(Media(each.offset, each.tokens, each.digest, each.data) for each in message.media)
    return NewSequence(
        slot=message.slot,
        prompt=_prompt(message) if first is None else first.prompt,
        stopping=convert.stopping_from_pb(message.stopping),
        sampling=convert.sampling_from_pb(message.sampling),
        blocks=tuple(message.blocks),
        computed_tokens=message.computed_tokens,
        generated_tokens=message.generated_tokens,
        logprobs=convert.logprobs_from_pb(message.logprobs),
        grammar=convert.grammar_from_pb(message.grammar) if message.HasField("grammar") else None,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        priority=message.priority,
        rank=message.rank,
        trace=TraceContext(message.traceparent, message.tracestate) if message.traceparent else None,
        further_blocks=tuple((group.first, tuple(group.blocks)) for group in message.further_blocks),
        draft_scope=message.draft_scope,
        no_drafts=message.no_drafts,
        media=media if first is None else first.media,
        prediction=tuple(message.prediction) if first is None else first.prediction,
    )


def report_to_pb(report: StepResult) -> pb.StepReport:
    message = pb.StepReport(
        step=report.step,
        orders_applied=report.orders_applied,
        slots=report.slots,
        token_counts=report.token_counts,
        token_ids=report.token_ids,
        logprobs=report.logprobs,
        step_ns=report.step_ns,
        forward_ns=report.forward_ns,
        running=report.running,
        used_blocks=report.used_blocks,
        queued=report.queued,
    )
    for told in report.drafting:
        slots, drafted, accepted = zip(*told.by_slot, strict=True) if told.by_slot else ((), (), ())
        message.drafting.add(
            drafts=told.drafts,
            draft_tokens=told.draft_tokens,
            accepted_tokens=told.accepted_tokens,
            source=told.source,
            slots=slots,
            slot_draft_tokens=drafted,
            slot_accepted_tokens=accepted,
        )
    for slot, tokens in report.prefilled:
        message.prefilled_slots.append(slot)
        message.prefilled_tokens.append(tokens)
    for slot, tokens in report.cached:
        message.cached_slots.append(slot)
        message.cached_tokens.append(tokens)
    for copied in report.copied:
        message.copied.add(number=copied.number, failed=copied.failed)
    for slot, reason in report.finished:
        message.finished.add(slot=slot, reason=convert.FINISH_REASONS_TO_PB[reason])
    for failure in report.failed:
        message.failed.add(slot=failure.slot, code=convert.FAILURE_CODES_TO_PB[failure.code], message=failure.message)
    for top in report.top_tokens:
        message.top_tokens.add(slot=top.slot, index=top.index, token_ids=top.token_ids, logprobs=top.logprobs)
    for scores in report.prompt_logprobs:
        scored = message.prompt_logprobs.add(slot=scores.slot, logprobs=scores.logprobs)
        for token_ids, logprobs in scores.tops or ():
            scored.top_counts.append(len(token_ids))
            scored.top_token_ids.extend(token_ids)
            scored.top_logprobs.extend(logprobs)
    for replayed in report.generated_scores:
        drawn = {"drawn_ids": replayed.drawn_ids, "drawn_logprobs": replayed.drawn_logprobs}
        message.generated_scores.add(slot=replayed.slot, logprobs=replayed.logprobs, **drawn)
    return message


def pool_to_pb(groups: Sequence[CacheGroup], block_size: int) -> pb.WarmUpResponse:
    """Return the answer of `WarmUp`, as far as it tells the KV cache."""
    first, *others = groups
    return pb.WarmUpResponse(
        num_blocks=first.num_blocks,
        block_size=block_size,
        further_groups=[
            pb.CacheGroup(
                num_blocks=each.num_blocks, window=each.window or 0, state=each.is_state, host_blocks=each.host_blocks
            )
            for each in others
        ],
        host_blocks=first.host_blocks,
    )


def info_to_pb(info: EngineInfo, rank: int, world_size: int) -> pb.InfoResponse:
    converted = {
        "scheduling": _SCHEDULING[info.scheduling],
        "grammar_kinds": [convert.GRAMMAR_KINDS_TO_PB[kind] for kind in info.grammar_kinds],
        "unsupported": [pb.Unsupported(field=name, reason=reason) for name, reason in info.unsupported],
    }
    return pb.InfoResponse(
        **{field.name: getattr(info, field.name) for field in fields(info)} | converted,
        rank=rank,
        world_size=world_size,
        shares_prompts=True,
        version=version("text-generation-trtllm"),
    )
