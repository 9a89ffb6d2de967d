"""What a call has to tell, as messages."""

from __future__ import annotations

import math

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.gateway.ask import Ask
from text_generation_shard.gateway.call import Call
from text_generation_shard.gateway.output import Output


def chunk(ask: Ask, output: Output) -> pb.GenerateResponse | None:
    """The tokens that may leave and have not left, which are then said to have; None if there are none.

    However slowly a client reads, it is never told more than this: what comes meanwhile is in its next chunk.
    """
    first, last = output.sent, output.leaving
    if first == last:
        return None
    output.sent = last
    message = pb.GenerateStreamChunk(
        token_ids=output.token_ids[first:last],
        sequence_index=output.index,
        prompt_tokens=len(ask.prompt),
        completion_tokens=last,
        logprobs=_logprobs(ask, output, first, last),
    )
    return pb.GenerateResponse(request_id=ask.request_id, chunk=message)


def complete(call: Call, output: Output) -> pb.GenerateResponse:
    """All of an output that is over."""
    ask = call.ask
    message = pb.GenerateComplete(
        output_token_ids=output.token_ids,
        sequence_index=output.index,
        finish_reason=output.finish_reason or "",
        prompt_tokens=len(ask.prompt),
        completion_tokens=len(output.token_ids),
        logprobs=_logprobs(ask, output, 0, len(output.token_ids)),
        prompt_logprobs=_prompt_logprobs(call),
    )
    if isinstance(output.matched, str):
        message.matched_stop_str = output.matched
    elif output.matched is not None:
        message.matched_token_id = output.matched
    return pb.GenerateResponse(request_id=ask.request_id, complete=message)


def _logprobs(ask: Ask, output: Output, first: int, last: int) -> list[pb.TokenLogprob]:
    """Of tokens [first, last); none if they were not asked for."""
    if ask.top_n is None:
        return []
    scored: list[pb.TokenLogprob] = []
    for place in range(first, last):
        message = pb.TokenLogprob(token_id=output.token_ids[place], logprob=output.logprobs[place])
        if (top := output.tops.get(place)) is not None:
            # Engines count ties at the last place in; who asked for n gets n.
            for token_id, logprob in zip(top.token_ids[: ask.top_n], top.logprobs, strict=False):
                message.top_logprobs.add(token_id=token_id, logprob=logprob)
        scored.append(message)
    return scored


def _prompt_logprobs(call: Call) -> list[pb.TokenLogprob]:
    """Of the prompt's tokens, NaN where none is known; none at all if they were not asked for.

    The first sequence's admission had the prompt scored, for all of them.
    """
    ask, scores = call.ask, call.outputs[0].prompt_scores
    if ask.prompt_top_n is None:
        return []
    scored = [pb.TokenLogprob(token_id=token_id, logprob=math.nan) for token_id in ask.prompt]
    if scores is None:
        return scored
    for message, logprob in zip(scored, scores.logprobs, strict=True):
        message.logprob = logprob
    for message, (token_ids, logprobs) in zip(scored, scores.tops or (), strict=False):
        for token_id, top in zip(token_ids, logprobs, strict=True):
            message.top_logprobs.add(token_id=token_id, logprob=top)
    return scored
