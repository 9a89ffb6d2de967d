"""Whole answers, serialized choice by choice: with log-probabilities they can be megabytes, which would block the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson

from text_generation_router.api.core.ids import Named

Json = dict[str, Any]


async def whole_answer(named: Named, kind: str, choices: Iterable[Json], usage: Json) -> bytes:
    """Return the answer as JSON. Each of `choices` is built, serialized and dropped before the next."""
    written = []
    for choice in choices:
        written.append(orjson.dumps(choice))
        await asyncio.sleep(0)
    return b'%b,"choices":[%b],"usage":%b}' % (named.head(kind), b",".join(written), orjson.dumps(usage))
