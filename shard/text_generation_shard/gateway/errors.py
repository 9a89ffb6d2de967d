"""How a call of the gateway's can fail: a status and one clear line."""

from __future__ import annotations

import grpc


class CallFailed(Exception):
    """A call ends with this status; the message is for whoever made it."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def refused(message: str) -> CallFailed:
    """The request asks what cannot be served; `message` begins with the field's name."""
    return CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message)
