"""--token-logprobs: which requests ask the engine for the log-probabilities of their tokens, and what replies show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_echo import CheckedEcho
from every_dialect import VERBATIM, stream_data
from http_stack import LIMITS, serve

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Failure, Orders

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION: Json = {"prompt": "Hello", "max_tokens": 2}


def tgi(**parameters: object) -> Json:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": 2, **parameters}}


class Asked(CheckedEcho):
    """Records for each sequence whether its tokens are to have log-probabilities."""

    asked: Sequence[bool] = ()

    def apply(self, orders: Orders) -> list[Failure]:
        Asked.asked = [*Asked.asked, *(admission.logprobs.tokens for admission in orders.placements)]
        return super().apply(orders)


class Unscored(Asked):
    """An engine that has no log-probabilities, or a server with --token-logprobs never."""

    @classmethod
    def build(cls, config: ShardConfig) -> CheckedEcho:
        engine = super().build(config)
        return replace(engine, info=replace(engine.info, unsupported=(("tokens", "no"), ("top_n", "no"))))


REQUESTS: list[tuple[str, Json, bool]] = [
    # (path, body, the reply shows them)
    ("/generate", tgi(), False),
    ("/generate", tgi(details=True), True),
    ("/generate", tgi(best_of=2, do_sample=True), True),
    ("/generate_stream", tgi(), True),
    ("/v1/chat/completions", CHAT, False),
    ("/v1/chat/completions", CHAT | {"stream": True}, False),
    ("/v1/chat/completions", CHAT | {"logprobs": True}, True),
    ("/v1/completions", COMPLETION | {"stream": True}, False),
    ("/v1/completions", COMPLETION | {"logprobs": 0}, True),
    ("/v1/messages", CHAT | {"model": "tgi"}, False),
]


@pytest.mark.parametrize("always", [False, True], ids=["auto", "always"])
async def test_requests_that_ask_for_them(demo_model: Path, *, always: bool) -> None:
    limits = replace(LIMITS, always_logprobs=always)
    async with serve(demo_model, build=Asked.build, limits=limits, chat_template=VERBATIM) as stack:
        for path, body, shown in REQUESTS:
            Asked.asked = ()
            async with stack.client.post(path, json=body) as response:
                text = await response.text()
            assert (response.status, set(Asked.asked)) == (200, {shown or always}), (path, body, text)
            assert ('"logprob":-' in text or '"token_logprobs":[-' in text) == (shown and "best_of" not in str(body))


async def test_an_engine_without_them(demo_model: Path) -> None:
    async with serve(demo_model, build=Unscored.build, chat_template=VERBATIM) as stack:
        for path, body, shown in REQUESTS:
            Asked.asked = ()
            async with stack.client.post(path, json=body) as response:
                text = await response.text()
            assert not any(Asked.asked)
            if shown and ("logprobs" in body or "best_of" in str(body)):
                assert response.status in (400, 422), (path, text)
                assert "is not supported by this engine: " in text
            else:
                assert response.status == 200, text
            if path == "/generate_stream":
                assert [event["token"]["logprob"] for event in stream_data(text.encode())] == [None, None]
