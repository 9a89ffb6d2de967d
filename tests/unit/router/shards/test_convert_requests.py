"""Conversion of requests to the wire and back; neutral values take no bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from hashlib import blake2b

import pytest

from text_generation_proto.parts import MAX_WHOLE_BYTES, Joiner, split
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions, Sampling, Stopping
from text_generation_router.request import (
    ImageFile,
    PlacedImage,
    Priority,
    QualityOfService,
    Request,
    RequestId,
    TenantId,
)
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.shards.convert import orders_to_pb, prompt_tops_from_pb
from text_generation_shard import convert as shard_convert
from text_generation_shard import engine
from text_generation_shard.engine import Media

PLAIN = Request(RequestId(1), (5, 6, 7), max_new_tokens=20)


def sent(request: Request, generated: tuple[int, ...] = (), *, own_cache: bool = False) -> pb.NewSequence:
    orders = orders_to_pb(
        SchedulerOutput(1, placements=(Placement(0, request, generated, (0, 1)),)), [2], own_cache=own_cache
    )
    return pb.Orders.FromString(orders.SerializeToString()).placements[0]


def received(message: pb.NewSequence) -> engine.NewSequence:
    return shard_convert.orders_from_pb(pb.Orders(number=1, placements=[message])).placements[0]


def test_every_option_arrives() -> None:
    request = replace(
        PLAIN,
        sampling=Sampling(
            greedy=False,
            min_p=0.1,
            output_frequency_penalty=0.5,
            output_presence_penalty=-0.25,
            logit_bias_ids=(3, 4),
            logit_bias_values=(1.5, -100.0),
            allowed_token_ids=(7, 0),
            bad_words=((1, 2), (3,)),
        ),
        stop_token_ids=frozenset({8, 9}),
        min_new_tokens=6,
        logprobs=LogprobOptions(prompt=True, prompt_top_n=4),
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )
    admission = received(sent(request))
    assert admission.sampling == request.sampling
    assert admission.stopping == Stopping(20, frozenset({2}), frozenset({8, 9}), min_new_tokens=6)
    assert admission.logprobs == LogprobOptions(prompt=True, prompt_top_n=4)
    assert admission.grammar == Grammar(GrammarKind.REGEX, "a+")


def test_drafts_come_from_outputs_of_the_same_tenant_and_salt_only() -> None:
    def scope(tenant: str, salt: str) -> str:
        return received(sent(replace(PLAIN, qos=QualityOfService(tenant=TenantId(tenant), salt=salt)))).draft_scope

    scopes = {scope(tenant, salt) for tenant in ("", "a", "b") for salt in ("", "a", "s")}
    assert len(scopes) == 9
    assert scope("a", "s") == scope("a", "s")
    assert "tenant" not in scope("tenant", "salt")


def test_blocks_of_all_groups_arrive() -> None:
    placement = Placement(0, PLAIN, (), (0, 1), further_blocks=((0, (4, 5)), (1, (7,))))
    first, second, third = ((0, (2, 3)), (4, (9,))), (), ((0, (8,)),)
    output = SchedulerOutput(1, placements=(placement,), allocations=first, further_allocations=(second, third))
    message = pb.Orders.FromString(orders_to_pb(output, [2]).SerializeToString())
    orders = shard_convert.orders_from_pb(message)
    assert orders.placements[0].further_blocks == placement.further_blocks
    assert (orders.allocations, orders.further_allocations) == (first, (second, third))
    message.further_allocations[1].counts[0] = 2
    with pytest.raises(shard_convert.InvalidOrders, match="do not add up"):
        shard_convert.orders_from_pb(message)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_a_prompt_of_several_answers_is_sent_once_to_a_shard_that_knows_this(shares_prompts: bool) -> None:
    other = replace(PLAIN, prompt=(8, 9))
    placed = [(PLAIN, ()), (other, ()), (replace(PLAIN, max_new_tokens=3), ()), (PLAIN, (4,)), (replace(other), ())]
    placements = tuple(Placement(slot, request, new, (slot,)) for slot, (request, new) in enumerate(placed))
    orders = orders_to_pb(SchedulerOutput(1, placements=placements), [2], shares_prompts=shares_prompts)
    arrived = shard_convert.orders_from_pb(pb.Orders.FromString(orders.SerializeToString())).placements
    assert [(*each.prompt,) for each in arrived] == [(5, 6, 7), (8, 9), (5, 6, 7), (5, 6, 7, 4), (8, 9)]
    assert sum(len(each.prompt) for each in orders.placements) == (9 if shares_prompts else 14)


def test_images_are_sent_with_their_prompt_and_again_when_a_request_moves() -> None:
    red, blue = (PlacedImage(1, 2, ImageFile(digest, data)) for digest, data in ((b"1", b"red"), (b"2", b"blue")))
    first, other = replace(PLAIN, media=(red,)), replace(PLAIN, media=(blue,))
    placed = [(first, ()), (replace(first), ()), (other, ()), (first, (4,))]  # their prompts are one object
    placements = tuple(Placement(slot, request, new, (slot,)) for slot, (request, new) in enumerate(placed))
    orders = orders_to_pb(SchedulerOutput(1, placements=placements), [2], shares_prompts=True)
    assert [each.prompt_of for each in orders.placements] == [0, 1, 0, 0]
    assert [[media.data for media in each.media] for each in orders.placements] == [[b"red"], [], [b"blue"], [b"red"]]
    media = orders.placements[2].media[0]
    assert (media.offset, media.tokens, media.digest) == (1, 2, b"2")


@pytest.mark.parametrize("size", [1, 200, MAX_WHOLE_BYTES - 300, MAX_WHOLE_BYTES, 2 * MAX_WHOLE_BYTES + 1])
def test_the_data_of_images_is_sent_in_parts_beside_the_orders(size: int) -> None:
    red, blue = (PlacedImage(1, 2, ImageFile(data[:1], data)) for data in (b"r" * size, b"b" * (size // 2 + 1)))
    requests = [PLAIN, replace(PLAIN, media=(red, blue)), replace(PLAIN, media=(blue,)), PLAIN]
    placements = tuple(Placement(slot, request, (), (slot,)) for slot, request in enumerate(requests))
    output = SchedulerOutput(1, placements=placements, prefill=((1, 3),))
    files: dict[bytes, bytes] = {}
    parts = list(split(orders_to_pb(output, [2], shares_prompts=True, files=files), files))
    assert all(0 < len(each.part) <= MAX_WHOLE_BYTES for each in parts)
    *most, last = map(Joiner[pb.Orders](sys.maxsize).join, parts)
    assert most == [None] * len(most)
    assert last == orders_to_pb(output, [2], shares_prompts=True)


def test_a_prediction_arrives_once_for_the_answers_of_its_request_and_again_when_one_moves() -> None:
    first = replace(PLAIN, prediction=(7, 8, 9))
    placed = [(first, ()), (replace(first), ()), (PLAIN, ()), (first, (4,))]  # their prompts are one object
    placements = tuple(Placement(slot, request, new, (slot,)) for slot, (request, new) in enumerate(placed))
    orders = orders_to_pb(SchedulerOutput(1, placements=placements), [2], shares_prompts=True)
    assert [len(each.prediction) for each in orders.placements] == [3, 0, 0, 3]
    arrived = shard_convert.orders_from_pb(pb.Orders.FromString(orders.SerializeToString())).placements
    assert [each.prediction for each in arrived] == [(7, 8, 9), (7, 8, 9), (), (7, 8, 9)]
    orders.placements[1].prediction.append(7)
    with pytest.raises(shard_convert.InvalidOrders, match="prompt_of 1 "):
        shard_convert.orders_from_pb(orders)


@pytest.mark.parametrize(("prompt_of", "prompt"), [(2, ()), (3, ()), (1, (5,))])
def test_a_prompt_of_no_earlier_placement_is_refused(prompt_of: int, prompt: tuple[int, ...]) -> None:
    placements = [pb.NewSequence(prompt=[1]), pb.NewSequence(slot=1, prompt=prompt, prompt_of=prompt_of)]
    with pytest.raises(shard_convert.InvalidOrders, match=f"prompt_of {prompt_of} "):
        shard_convert.orders_from_pb(pb.Orders(number=1, placements=placements))


@pytest.mark.parametrize("unknown", [b"\x90\x01\x05", b"\x91\x01" + bytes(8), b"\x93\x01\x94\x01", b"\x9a\x06\x02xx"])
def test_a_prompt_of_another_type_is_an_unknown_field(unknown: bytes) -> None:
    """A number, eight bytes and a group with the number of the prompt; and bytes with another."""
    split = b"\x92\x01\x04" + bytes((1, 0, 0, 0)) + unknown + b"\x95\x01" + b"\xff" * 4  # packed, then alone
    assert [*received(pb.NewSequence.FromString(split)).prompt] == [1, 2**32 - 1]
    assert [*received(pb.NewSequence.FromString(unknown)).prompt] == []


def test_the_images_of_a_prompt_arrive_once_for_its_answers() -> None:
    media = pb.Media(offset=1, tokens=2, digest=b"d" * 32, data=b"file")
    placements = [pb.NewSequence(prompt=[1, 2, 2**32 - 1], media=[media]), pb.NewSequence(slot=1, prompt_of=1)]
    arrived = shard_convert.orders_from_pb(pb.Orders(number=1, placements=placements)).placements
    assert [[*each.prompt] for each in arrived] == [[1, 2, 2**32 - 1]] * 2
    assert [each.media for each in arrived] == [(Media(1, 2, b"d" * 32, b"file"),)] * 2
    placements[1].media.append(media)
    with pytest.raises(shard_convert.InvalidOrders, match="prompt_of 1 "):
        shard_convert.orders_from_pb(pb.Orders(number=1, placements=placements))


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.UNSPECIFIED])
def test_every_kind_of_grammar_arrives(kind: GrammarKind) -> None:
    grammar = received(sent(replace(PLAIN, grammar=Grammar(kind, "x")))).grammar
    assert grammar is not None
    assert grammar.kind.value == kind.value


def test_neutral_values_are_not_sent() -> None:
    message = sent(PLAIN)
    assert not message.HasField("grammar")
    assert {field.name for field, _ in message.sampling.ListFields()} == {"greedy"}
    assert {field.name for field, _ in message.stopping.ListFields()} == {"max_new_tokens", "eos_token_ids"}


@pytest.mark.parametrize(("generated", "left"), [((), 6), ((1, 2), 4), (tuple(range(9)), 0)])
def test_generated_tokens_count_towards_min_new_tokens(generated: tuple[int, ...], left: int) -> None:
    assert sent(replace(PLAIN, min_new_tokens=6), generated).stopping.min_new_tokens == left


def test_a_resumed_sequence_requests_no_prompt_logprobs() -> None:
    message = sent(replace(PLAIN, logprobs=LogprobOptions(prompt=True, prompt_top_n=3)), generated=(1,))
    assert (message.logprobs.prompt, message.logprobs.prompt_top_n) == (False, 0)


def test_prompt_top_tokens_are_read_from_their_columns() -> None:
    scored = pb.PromptLogprobs(
        logprobs=[0.0, -1.0, -2.0], top_counts=[0, 2, 1], top_token_ids=[5, 6, 7], top_logprobs=[-0.5, -1.5, -2.5]
    )
    assert list(prompt_tops_from_pb(scored)) == [[], [(5, b"-0.5"), (6, b"-1.5")], [(7, b"-2.5")]]
    assert list(prompt_tops_from_pb(pb.PromptLogprobs(logprobs=[0.0]))) == []


@pytest.mark.parametrize("salt", ["pepper", "a tenant\0salt", "ü"])
def test_an_engine_with_its_own_prefix_cache_gets_a_digest_of_the_salt(salt: str) -> None:
    request = replace(PLAIN, qos=QualityOfService(salt=salt))
    digest = blake2b(salt.encode(), digest_size=16, person=b"cache salt").hexdigest()
    assert received(sent(request, own_cache=True)).cache_salt == digest, "every router sends the same one"
    assert sent(request).cache_salt == sent(PLAIN, own_cache=True).cache_salt == ""


def test_an_engine_with_a_queue_of_its_own_gets_the_priority_and_the_adapter() -> None:
    for priority in Priority:
        request = replace(PLAIN, adapter="sql", qos=QualityOfService(priority=priority))
        own, other = (received(sent(request, own_cache=own_cache)) for own_cache in (True, False))
        assert (own.priority, other.priority) == (priority + 1, 0)
        assert own.adapter == other.adapter == "sql"
