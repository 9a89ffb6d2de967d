"""Questions to the server before the load: is it there, which model, what it says of itself."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from text_generation_bench.load.client import base_url, tls_context
from text_generation_bench.load.settings import LoadSettings, fail

TIMEOUT_S = 10.0
INFO_FIELDS = (
    "model_id",
    "model_dtype",
    "model_device_type",
    "version",
    "server_version",
    "sha",
    "max_concurrent_requests",
    "max_total_tokens",
)


def describe_server(settings: LoadSettings) -> dict[str, Any]:
    """Return the model and what the server says of itself. A server that is not there: one line and an exit."""
    try:
        models = _get(settings, "/v1/models")
        info = _get(settings, "/info")
    except ssl.SSLError as error:
        fail(f"no server at {settings.url}: TLS: {getattr(error, 'verify_message', '') or error.reason or error}")
    except TimeoutError:
        fail(f"no server at {settings.url}: no answer within {TIMEOUT_S:g} s")
    except OSError as error:
        fail(f"no server at {settings.url}: {error.strerror or error}")
    except (http.client.HTTPException, ValueError) as error:
        fail(f"no server at {settings.url}: {type(error).__name__}: {error}")
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    return {"model": str(first.get("id") or "tgi")} | {name: info[name] for name in INFO_FIELDS if name in info}


def _get(settings: LoadSettings, path: str) -> dict[str, Any]:
    """Return the JSON object at a path; empty if there is none. Raises OSError, HTTPException and ValueError."""
    parts = urlsplit(base_url(settings.url))
    assert parts.hostname is not None
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=TIMEOUT_S, context=tls_context(settings)
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path + path, headers=settings.headers)
        response = connection.getresponse()
        body = response.read(1 << 20)
    finally:
        connection.close()
    if response.status != 200:
        return {}
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def version_of(server: Mapping[str, Any]) -> str:
    """Return the version that a server says it has; "" if it says none. `version` may be that of TGI, for its clients."""
    return str(server.get("server_version") or server.get("version") or "")
