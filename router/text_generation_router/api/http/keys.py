"""API keys: who may call, as which tenant, how urgently, and how much.

Keys come from `--api-key` and from `--api-keys-file`, a TOML file that is read again on SIGHUP:

    [[keys]]
    key = "sk-…"                    # or sha256 = "…", the hexadecimal digest of the key
    tenant = "search"               # default: a digest of the key; required with sha256
    max_priority = "system"         # default: --max-priority
    trust_headers = true            # default: true for the only key, else false
    requests_per_minute = 600       # default: no limit
    tokens_per_minute = 100000      # prompt and new tokens; default: no limit

Keys are checked before the body is read, on every route but the health probes, unknown routes included. The exemption
depends on the resolved route, never on the path as written: `//health`, `/v1/../health` and `/%68ealth` are exempt exactly
where they resolve to a probe.
"""

import hmac
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from text_generation_common.model_files import read_file
from text_generation_router.config import RouterSettings
from text_generation_router.error_attributes import Operation
from text_generation_router.errors import ClientError, InvalidRequest, Unauthorized
from text_generation_router.rate_limits import RateCounter, RateLimits, Rates
from text_generation_router.request import DEFAULT_TENANT, Priority, TenantId

X_API_KEY = "x-api-key"
"""Header in which Anthropic's clients send the key."""
MAX_KEYS_FILE = 4 << 20
"""Bytes of the file of keys."""

TENANT = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers in which a trusted caller names its tenant."""
LONGEST_TENANT = 128

_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The rights of a caller."""

    tenant: TenantId = DEFAULT_TENANT
    max_priority: Priority = Priority.DEFAULT
    """The most urgent priority that it may ask for."""
    trusted: bool = False
    """True if its headers may name another tenant."""
    rates: Rates | None = None
    """The limits of its key; None: it has none."""
    counter: RateCounter = field(default_factory=RateLimits, compare=False)
    """Counts for them."""

    async def start_request(self) -> None:
        """Count one request. Raises RateLimited, Unhealthy."""
        if self.rates is not None:
            await self.counter.start_request(self.rates)

    def spend_tokens(self, tokens: int) -> None:
        if self.rates is not None:
            self.counter.spend_tokens(self.rates, tokens)


ANYONE = KeyHolder()
"""The rights of a caller without a key."""

PriorityName = Literal["system", "interactive", "default", "bulk"]


class _KeyEntry(BaseModel):
    """One entry of the file of keys."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: str | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=LONGEST_TENANT, pattern="^[ -~]*$")] | None = None
    max_priority: PriorityName | None = None
    trust_headers: bool | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> "_KeyEntry":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either `key` or `sha256` must be given")
        if self.key is None and self.tenant is None:
            raise ValueError("`sha256` needs a `tenant`")
        return self


class ApiKeys:
    """The accepted API keys; without any, every request is accepted. Only digests are kept."""

    def __init__(self, config: RouterSettings, counter: RateCounter | None = None) -> None:
        """`counter` counts for the rate limits; default: this process. Raises ValueError; its text contains no key."""
        self._counter = RateLimits() if counter is None else counter
        self._given = tuple(dict.fromkeys(config.api_key))
        self._file = Path(config.api_keys_file) if config.api_keys_file else None
        self._max_priority = Priority[config.max_priority.upper()]
        trusted = config.trust_caller_headers
        self._anonymous = KeyHolder(max_priority=self._max_priority if trusted else Priority.DEFAULT, trusted=trusted)
        self._holders: dict[bytes, KeyHolder] = {}
        self._reloading = Lock()
        self.reload()

    def __bool__(self) -> bool:
        """Return True if a key is required."""
        return bool(self._holders) or self._file is not None

    @property
    def several(self) -> bool:
        """True if keys distinguish tenants."""
        return len({holder.tenant for holder in self._holders.values()}) > 1

    def reload(self) -> None:
        """Read the file again. Rate limits that stay the same keep their level. Raises ValueError and changes nothing.

        Runs in any thread: a large file takes a second.
        """
        with self._reloading:
            self._holders = self._read()

    def _read(self) -> dict[bytes, KeyHolder]:
        entries = [_KeyEntry(key=key) for key in self._given] + ([] if self._file is None else _read_keys(self._file))
        keys = [entry.key for entry in entries if entry.key is not None]
        if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
            raise ValueError("an API key must be made of visible ASCII characters")
        digests = [
            _digest(entry.key) if entry.key is not None else bytes.fromhex(entry.sha256 or "") for entry in entries
        ]
        holders: dict[bytes, KeyHolder] = {}
        for digest, entry in zip(digests, entries, strict=True):
            if digest in holders:
                raise ValueError("an API key is given twice")
            holders[digest] = self._holder_of(entry, digest, only=len(entries) == 1)
        return holders

    def _holder_of(self, entry: "_KeyEntry", digest: bytes, *, only: bool) -> KeyHolder:
        rates = Rates(digest.hex(), entry.requests_per_minute, entry.tokens_per_minute)
        return KeyHolder(
            tenant=TenantId(entry.tenant or ("" if only else _tenant_name(entry.key or ""))),
            max_priority=Priority[entry.max_priority.upper()] if entry.max_priority else self._max_priority,
            trusted=only if entry.trust_headers is None else entry.trust_headers,
            rates=rates if entry.requests_per_minute or entry.tokens_per_minute else None,
            counter=self._counter,
        )

    def holder(self, headers: Mapping[str, str]) -> KeyHolder | None:
        """Return the holder of the key in the headers; None without a valid key, the anonymous one if none is needed.

        A key is sent as `Authorization: Bearer <key>` or `x-api-key: <key>`, exactly.
        """
        if not self:
            return self._anonymous
        authorization = headers.get(hdrs.AUTHORIZATION, "")
        holder = None
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            holder = self._find(authorization[len(_SCHEME) :])
        if holder is None and (key := headers.get(X_API_KEY)) is not None:
            holder = self._find(key)
        return holder

    def _find(self, key: str) -> KeyHolder | None:
        # Constant time, and every key is compared, so that the time reveals nothing.
        digest = _digest(key)
        matches = [holder for known, holder in self._holders.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def middleware(self, exempt: Collection[web.AbstractRoute]) -> Middleware:
        """The middleware that finds the holder of a request's key. Without a valid key it raises Unauthorized.

        Routes in `exempt` need no key. POST requests count for the holder's rate limits: it raises RateLimited.
        """
        exempt = frozenset(exempt)

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            holder = self.holder(request.headers)
            if holder is None:
                if request.match_info.route not in exempt:
                    raise Unauthorized
                holder = ANYONE
            request[HOLDER] = holder
            if holder.rates is not None and request.method == hdrs.METH_POST:
                await holder.start_request()
            return await handler(request)

        return check


HOLDER = web.RequestKey("holder", KeyHolder)


class Forbidden(ClientError):
    """The key of the request is not that of an operator."""

    status = 403
    error_type = "forbidden"
    message = "This needs an API key with `trust_headers`"
    openai_code = "permission_denied"
    anthropic_type = "permission_error"
    operations = Operation.OPERATE


def tenant_of(request: web.Request) -> TenantId:
    """Return the tenant of a request. Raises InvalidRequest for an invalid header."""
    return read_tenant(request.headers, request[HOLDER])


def read_tenant(headers: Mapping[str, str], holder: KeyHolder) -> TenantId:
    """Return the tenant that the headers of a request of `holder` name. Raises InvalidRequest."""
    if not holder.trusted:  # one tenant must not be able to pass for another
        return holder.tenant
    for name in TENANT:
        given = headers.get(name)
        if given is None:
            continue
        if len(given) > LONGEST_TENANT or not (given.isascii() and given.isprintable()):
            raise InvalidRequest(f"header `{name}` must have at most {LONGEST_TENANT} characters, of printable ASCII")
        return TenantId(given)
    return holder.tenant


def _read_keys(path: Path) -> "list[_KeyEntry]":
    """Return the entries of the file of keys. Raises ValueError for an unreadable or invalid file, or one without keys."""
    try:
        document = tomllib.loads(read_file(path, MAX_KEYS_FILE).decode())
        entries: Any = document.pop("keys", None)
        if document or not isinstance(entries, list) or not entries:
            raise ValueError("expected [[keys]] tables, at least one, and nothing else")
        return [_KeyEntry.model_validate(entry) for entry in entries]
    except ValidationError as error:
        detail = error.errors()[0]
        name = ".".join(map(str, detail["loc"]))
        raise ValueError(f"file of API keys {path}: {name}: {detail['msg']}".replace(": : ", ": ")) from None
    except RecursionError:
        raise ValueError(f"file of API keys {path}: it is nested too deep") from None
    except OSError as error:
        raise ValueError(f"file of API keys {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"file of API keys {path}: {error}") from None


def _tenant_name(key: str) -> str:
    # Not derived from the digest that is compared: a name appears in logs and must not help to guess a key.
    return sha256(b"tenant " + key.encode()).hexdigest()[:16]


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()
