"""Conversion of requests, errors and the state of the replicas to messages of worker_link.proto, and back."""

from array import array
from collections.abc import Sequence
from dataclasses import asdict

import orjson

from text_generation_proto import convert
from text_generation_proto.v1 import shard_pb2 as v1
from text_generation_proto.values import TraceContext
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import GenerationFailed, ServingError, error_classes
from text_generation_router.request import (
    ImageFile,
    Moves,
    PlacedImage,
    Priority,
    QualityOfService,
    Request,
    RequestId,
    RequestProgress,
    TenantId,
    TokenId,
)
from text_generation_router.scheduling.scheduler import SchedulerStats
from text_generation_router.shards.cluster import ClusterInfo, MemberInfo
from text_generation_router.worker_link.link import LinkBroken

INFO = "info"
"""Method that returns the state of the replicas, as `info_to_json`."""
SET_ADAPTER = "set_adapter"
"""The method of `ClusterInterface`."""

_ERRORS = {error.__name__: error for error in error_classes() if error.__init__ is ServingError.__init__}
"""The errors that a scheduler process may raise. Those about a prompt have details that do not cross."""
_PRIORITIES = {priority.value: priority for priority in Priority}


def text_to_pb(text: str) -> bytes:
    """Return the bytes of a name that a client gave: it may have code points that are not characters."""
    return text.encode("utf-8", "surrogatepass")


def text_from_pb(text: bytes) -> str:
    """Return the name. Raises LinkBroken."""
    try:
        return text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise LinkBroken(str(error)) from error


def request_to_pb(request: Request, number: RequestId, progress: RequestProgress | None = None) -> pb.Submit:
    """Convert a request without the data of its images, under a number of its own; `progress` if it was accepted before."""
    qos, trace, progressed = request.qos, request.trace or TraceContext(""), progress or RequestProgress()
    stopping = v1.Stopping(
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        min_new_tokens=request.min_new_tokens,
    )
    return pb.Submit(
        request=number,
        prompt=request.prompt,
        media=[v1.Media(offset=each.offset, tokens=each.tokens, digest=each.image.digest) for each in request.media],
        accepted=progress is not None,
        generated=progressed.generated,
        moves=progressed.moves.total,
        fruitless_moves=progressed.moves.fruitless,
        sampling=convert.sampling_to_pb(request.sampling),
        stopping=stopping,
        ignore_eos=request.ignore_eos,
        logprobs=convert.logprobs_to_pb(request.logprobs),
        grammar=None if request.grammar is None else convert.grammar_to_pb(request.grammar),
        adapter=request.adapter,
        tenant=text_to_pb(qos.tenant),
        priority=qos.priority,
        salt=text_to_pb(qos.salt),
        first_token_by=qos.first_token_by,
        queue_by=qos.queue_by,
        end_by=qos.end_by,
        job=text_to_pb(qos.job),
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        turn_ends=request.turn_ends,
        prediction=request.prediction,
    )


def request_from_pb(message: pb.Submit, images: Sequence[bytes] = (), before: Request | None = None) -> Request:
    """Convert it back: the part of a request that scheduler and shards use. Raises LinkBroken.

    `images` are the data of its images. Prompt, images and prediction that are equal to those of the request `before` are
    these objects: a request for many answers has them once.
    """
    stopping = convert.stopping_from_pb(message.stopping)
    if not message.prompt or not stopping.max_new_tokens > 0 or not len(message.generated) < stopping.max_new_tokens:
        raise LinkBroken("a request without tokens")
    if message.priority not in _PRIORITIES:
        raise LinkBroken("a request of an unknown priority")
    prompt: Sequence[TokenId] = array("I", message.prompt)
    if len(images) != len(message.media):
        raise LinkBroken("a request without the data of its images")
    placed = zip(message.media, images, strict=True)
    media = tuple(PlacedImage(each.offset, each.tokens, ImageFile(each.digest, data)) for each, data in placed)
    prediction: Sequence[TokenId] = array("I", message.prediction)
    if before is not None and (prompt, media, prediction) == (before.prompt, before.media, before.prediction):
        prompt, media, prediction = before.prompt, before.media, before.prediction
    qos = QualityOfService(
        TenantId(text_from_pb(message.tenant)),
        _PRIORITIES[message.priority],
        text_from_pb(message.salt),
        message.first_token_by if message.HasField("first_token_by") else None,
        message.queue_by if message.HasField("queue_by") else None,
        message.end_by if message.HasField("end_by") else None,
        text_from_pb(message.job),
    )
    return Request(
        id=RequestId(message.request),
        prompt=prompt,
        media=media,
        max_new_tokens=stopping.max_new_tokens,
        sampling=convert.sampling_from_pb(message.sampling),
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=message.ignore_eos,
        min_new_tokens=stopping.min_new_tokens,
        logprobs=convert.logprobs_from_pb(message.logprobs),
        grammar=convert.grammar_from_pb(message.grammar) if message.HasField("grammar") else None,
        adapter=message.adapter,
        qos=qos,
        trace=TraceContext(message.traceparent, message.tracestate) if message.traceparent else None,
        turn_ends=tuple(message.turn_ends),
        prediction=prediction,
    )


def progress_from_pb(message: pb.Submit) -> RequestProgress | None:
    """Convert the progress of a request back; None if it is new."""
    progress = RequestProgress(message.generated, Moves(message.moves, message.fruitless_moves))
    return progress if message.accepted else None


def refusal_to_pb(error: ServingError) -> pb.Refusal:
    return pb.Refusal(
        error=type(error).__name__,
        text=str(error).removeprefix(error.prefix),
        retry_after_s=error.retry_after_s,
        param=error.param or "",
    )


def refusal_from_pb(message: pb.Refusal) -> ServingError:
    error = _ERRORS.get(message.error, GenerationFailed)
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    return error(message.text, retry_after_s, param=message.param or None)


def info_to_json(info: ClusterInfo) -> bytes:
    return orjson.dumps(asdict(info))


def info_from_json(body: bytes) -> ClusterInfo:
    info = orjson.loads(body)
    members = [MemberInfo(**member) for member in info["members"]]
    return ClusterInfo(SchedulerStats(**info["stats"]), members, info["isolated"])
