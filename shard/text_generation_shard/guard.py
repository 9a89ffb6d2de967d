"""The gRPC server of a shard, and the checks that come before any service: certificate, token and limits of calls."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from text_generation_common.log import log
from text_generation_proto.access import TOKEN_KEY, Access
from text_generation_proto.channel import SERVER_OPTIONS, read_certificates

MAX_UNARY_BYTES = 4096
"""Longest request of a call that has one request: WarmUp, Info, health checks."""
READ_S = 10.0
"""Seconds for the request of such a call."""
MAX_UNARY_CALLS = 16
"""Most concurrent calls of a method with one request and one reply, and requests of a method that are read at once."""
WARM_UP = "/text_generation.v1.Shard/WarmUp"
"""The method that serves one call at a time."""
MAX_STREAMS = 16
"""Most calls of a connection, cancelled ones included until their memory is free: a router has five. By default gRPC has no
limit, and gRPC does not free all memory of calls that are reset while more than a hundred of them wait."""
MAX_CALLS = 8192
"""Most concurrent calls of all methods."""


if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


def create_server(token: str = "", max_calls: int = MAX_CALLS) -> grpc.aio.Server:
    """Return a server that serves only calls with this token; "": all calls."""
    options = (*SERVER_OPTIONS, ("grpc.max_concurrent_streams", MAX_STREAMS))
    return grpc.aio.server(interceptors=(CallGuard(token),), options=options, maximum_concurrent_rpcs=max_calls)


def server_credentials(access: Access) -> grpc.ServerCredentials:
    """Return credentials that demand a client certificate and follow changes of the files. Raises OSError."""
    current = read_certificates(access)

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, key, cert = current
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificates if the files changed. gRPC calls it at each new connection."""
        nonlocal current
        try:
            files = read_certificates(access)
        except OSError as error:
            log.warning("certificates cannot be read: the former ones stay in use", reason=str(error))
            return None
        if files == current:
            return None
        current = files
        log.info("certificates read again")
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]  # the stubs do not know that None means no change
        require_client_authentication=True,
    )


def settled(behavior: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return a handler that drops its references to a call that it aborts.

    The error of `abort` refers to the frames of the handler, and so to the call, which refers to the error: it would stay
    until garbage is collected, and count as one of its connection's.
    """

    @wraps(behavior)
    async def settle(*arguments: object) -> None:
        try:
            await behavior(*arguments)
        except grpc.aio.AbortError as error:  # the status is sent; gRPC raises the error again
            error.__traceback__ = None

    return settle


class CallGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, and calls with one request that are too many, too long or too late.

    Its handlers are those of streaming calls, for which gRPC reads no message before the handler asks for one.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._calls = Counter[str]()
        self._readers = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_UNARY_CALLS))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if self._token and not self._is_known(handler_call_details):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return self._limited(handler_call_details.method, handler)

    def _is_known(self, call: grpc.HandlerCallDetails) -> bool:
        values = [value for key, value in call.invocation_metadata if key == TOKEN_KEY]
        given = values[0] if values else ""
        return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._token)

    def _limited(self, method: str, handler: Handler) -> Handler:
        behavior: Any = handler.unary_unary or handler.unary_stream
        most = MAX_CALLS if handler.response_streaming else 1 if method == WARM_UP else MAX_UNARY_CALLS

        @settled
        async def serve(_requests: object, context: Context) -> None:
            if self._calls[method] >= most:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} calls of {method} are served at a time"
                )
            self._calls[method] += 1
            try:
                reply = await behavior(await self._read(method, handler, context), context)
                if not handler.response_streaming:
                    await context.write(reply)
            finally:
                self._calls[method] -= 1

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    async def _read(self, method: str, handler: Handler, context: Context) -> object:
        """Return the request of a call. Abort if it is too long, too late or none."""
        try:
            async with asyncio.timeout(READ_S), self._readers[method]:
                data = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {READ_S:.0f} s")
        if data is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        if len(data) > MAX_UNARY_BYTES:
            message = f"the request has {len(data)} bytes, at most {MAX_UNARY_BYTES} are allowed"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        try:
            return (handler.request_deserializer or bytes)(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of this method")


@settled
async def _refuse(_requests: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid shard token")
