"""Whole answers, written down choice by choice: many with log-probabilities are megabytes, and others wait meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson

from text_generation_router.api.core.ids import Named

Json = dict[str, Any]


async def whole_answer(named: Named, kind: str, choices: Iterable[Json], usage: Json) -> bytes:
    """The answer as JSON; each of `choices` is made when its turn comes, and forgotten once it is written."""
    written = []
    for choice in choices:
        written.append(orjson.dumps(choice))
        await asyncio.sleep(0)
    return b'%b,"choices":[%b],"usage":%b}' % (named.head(kind), b",".join(written), orjson.dumps(usage))
