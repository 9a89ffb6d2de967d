"""Conversion of `values` to and from protobuf. The field names of the two are the same.

Only fields that differ from their neutral value are written, so that a new sequence stays small.
"""

from dataclasses import fields
from itertools import chain, islice

from text_generation_proto.copies import CopiedBlocks, Copy
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import (
    FailureCode,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
    Stopping,
)

FINISH_REASONS_TO_PB = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_TOKEN,
}
FINISH_REASONS_FROM_PB = {value: reason for reason, value in FINISH_REASONS_TO_PB.items()}
_OF_ROUTER = FailureCode.EXPIRED, FailureCode.LOST
FAILURE_CODES_TO_PB = {
    code: pb.FailureCode.Value(f"FAILURE_CODE_{code.name}") for code in FailureCode if code not in _OF_ROUTER
}
FAILURE_CODES_FROM_PB = {value: code for code, value in FAILURE_CODES_TO_PB.items()}
GRAMMAR_KINDS_TO_PB = {
    kind: pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind if kind.name != "UNSPECIFIED"
}
GRAMMAR_KINDS_FROM_PB = {value: kind for kind, value in GRAMMAR_KINDS_TO_PB.items()}

_SAMPLING = [(field.name, field.default) for field in fields(Sampling) if field.name != "greedy"]
_LISTS = {name for name, neutral in _SAMPLING if neutral == ()}


def sampling_to_pb(sampling: Sampling) -> pb.Sampling:
    """Return the message. `greedy` is always written: its neutral value is not protobuf's zero."""
    given = {name: value for name, neutral in _SAMPLING if (value := getattr(sampling, name)) != neutral}
    if words := given.pop("bad_words", ()):
        given |= {"bad_word_ids": chain.from_iterable(words), "bad_word_lengths": map(len, words)}
    return pb.Sampling(greedy=sampling.greedy, **given)


def sampling_from_pb(message: pb.Sampling) -> Sampling:
    """Return the value; a field that was not sent is neutral."""
    given = {field.name: value for field, value in message.ListFields()} | {"greedy": message.greedy}
    given |= {name: tuple(given[name]) for name in _LISTS & given.keys()}
    if message.bad_word_ids or message.bad_word_lengths:
        ids, lengths = given.pop("bad_word_ids", ()), given.pop("bad_word_lengths", ())
        rest = iter(ids)
        # An empty word, which is refused, stands for lengths that do not fit.
        fits = sum(lengths) == len(ids)
        given["bad_words"] = tuple(tuple(islice(rest, length)) for length in lengths) if fits else ((),)
    return Sampling(**given)


def stopping_from_pb(message: pb.Stopping) -> Stopping:
    return Stopping(
        max_new_tokens=message.max_new_tokens,
        eos_token_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(message.stop_token_ids),
        min_new_tokens=message.min_new_tokens,
    )


def logprobs_to_pb(options: LogprobOptions) -> pb.LogprobOptions:
    return pb.LogprobOptions(
        top_n=options.top_n,
        prompt=options.prompt,
        prompt_top_n=options.prompt_top_n,
        no_tokens=not options.tokens,
        generated=options.generated,
    )


def logprobs_from_pb(message: pb.LogprobOptions) -> LogprobOptions:
    return LogprobOptions(
        message.top_n,
        message.prompt,
        message.prompt_top_n,
        tokens=not message.no_tokens,
        generated=message.generated,
    )


def grammar_to_pb(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=GRAMMAR_KINDS_TO_PB[grammar.kind], text=grammar.text)


def grammar_from_pb(message: pb.Grammar) -> Grammar:
    """Return the value; its kind is UNSPECIFIED if this version does not know it."""
    return Grammar(GRAMMAR_KINDS_FROM_PB.get(message.kind, GrammarKind.UNSPECIFIED), message.text)


def copy_to_pb(copy: Copy) -> pb.Copy:
    groups = [pb.CopiedBlocks(device=each.device, host=each.host, tags=each.tags) for each in copy.groups]
    return pb.Copy(number=copy.number, load=copy.is_load, groups=groups)


def copy_from_pb(message: pb.Copy) -> Copy:
    groups = (CopiedBlocks(tuple(each.device), tuple(each.host), tuple(each.tags)) for each in message.groups)
    return Copy(message.number, message.load, tuple(groups))
