"""The token ids of pieces of long texts, for texts that come again with something new at their end.

Equal texts are cut into equal pieces up to the last one. Pieces are found by a digest; their texts are not kept. Tenants
find only their own, so the time of an answer tells nothing of another tenant's texts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256
from threading import Lock

from text_generation_router.request import TenantId

MAX_CACHED_BYTES = 64 << 20
"""Memory of all pieces: some 16 million tokens."""
PIECE_BYTES = 300
"""Memory of a piece beside its token ids."""


def piece_digest(salt: str, text: str, start: int, stop: int) -> bytes:
    """Return the digest of all that the tokens of `text[start:stop]` depend on, which is also the character before."""
    place = "inner" if start else "first"
    return sha256(f"{len(salt)} {salt}{place}{text[max(start - 1, 0) : stop]}".encode()).digest()


class PieceCache:
    """Pieces of bounded memory in all. The tenant with the most loses its least recently used. Safe to share by threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0
        """Memory of all pieces."""
        self._lock = Lock()
        self._pieces: dict[TenantId, OrderedDict[bytes, array[int]]] = {}
        """By tenant, least recently used first. No tenant is without a piece."""
        self._bytes: dict[TenantId, int] = {}
        """Memory of the pieces of each tenant."""

    def get(self, tenant: TenantId, digest: bytes) -> array[int] | None:
        """Return the token ids of a piece, or None. They must not be changed."""
        with self._lock:
            pieces = self._pieces.get(tenant)
            if pieces is None or (ids := pieces.get(digest)) is None:
                return None
            pieces.move_to_end(digest)
            return ids

    def put(self, tenant: TenantId, digest: bytes, ids: array[int]) -> None:
        """Keep the token ids of a piece."""
        with self._lock:
            pieces = self._pieces.setdefault(tenant, OrderedDict())
            if digest not in pieces:
                pieces[digest] = ids
                self._add(tenant, _memory(ids))
            if self.bytes > self._max_bytes:
                self._evict()

    def _evict(self) -> None:
        """Give back a part of what the tenant with the most has, so that tenants are seldom compared."""
        tenant = max(self._bytes, key=self._bytes.__getitem__)
        pieces, wanted = self._pieces[tenant], self.bytes - self._max_bytes + self._bytes[tenant] // 16
        while wanted > 0 and pieces:
            size = _memory(pieces.popitem(last=False)[1])
            wanted -= size
            self._add(tenant, -size)
        if not pieces:
            del self._pieces[tenant], self._bytes[tenant]

    def _add(self, tenant: TenantId, size: int) -> None:
        self.bytes += size
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size


def _memory(ids: array[int]) -> int:
    return PIECE_BYTES + ids.itemsize * len(ids)
