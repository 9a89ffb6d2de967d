"""Errors of request bodies that cannot be read. On TGI's routes their texts are those of TGI's web framework."""

from text_generation_router.error_attributes import TgiBody
from text_generation_router.errors import ClientError


class BodyRejected(ClientError):
    """The body of a request cannot be read."""

    tgi_body = TgiBody.TEXT


class InvalidJson(BodyRejected):
    """The body is not valid JSON."""

    status = 400
    error_type = "invalid_json"


class UnsupportedTransferCoding(BodyRejected):
    """The body is transferred in a coding other than chunked."""

    status = 400
    error_type = "unsupported_transfer_coding"
    message = "Failed to buffer the request body: of `Transfer-Encoding` only chunked is supported"
    closes_connection = True


class BodyTooLarge(BodyRejected):
    """The body is larger than the limit."""

    status = 413
    error_type = "payload_too_large"
    prefix = "Failed to buffer the request body: length limit exceeded. The limit of this server, --payload-limit, is "
    message = "32000000 bytes"
    anthropic_type = "request_too_large"
    closes_connection = True  # the client may still be sending


class BodyTimeout(BodyRejected):
    """The body arrives too slowly."""

    status = 408
    error_type = "request_timeout"
    message = "Failed to buffer the request body: it arrives too slowly"
    closes_connection = True


class UnsupportedMediaType(BodyRejected):
    """The content type of the body is not JSON."""

    status = 415
    error_type = "unsupported_media_type"
    message = "Expected request with `Content-Type: application/json`"


class InvalidBody(BodyRejected):
    """The body does not match the schema of the route."""

    status = 422
    error_type = "invalid_body"
    openai_code = "invalid_value"
    tgi_prefix = "Failed to deserialize the JSON body into the target type: "
