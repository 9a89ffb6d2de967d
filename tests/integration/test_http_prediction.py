"""Predictions of chats: they change no text, and usage tells what became of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from byte_tokenizer import write_tokenizer
from every_dialect import VERBATIM
from http_stack import LIMITS, Stack, serve
from scripted_drafts import ScriptedDrafts, draft_by
from sse_client import Json, chunks, joined, post, whole
from tiny_engines import TINY_LLAMA

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine

CHAT = "/v1/chat/completions"
NEW = 60
UNKNOWN = 263
"""The token `ab` of the tokenizer, which the model is said not to have."""
DRAFTED = "text_generation_spec_decode_draft_tokens_total"
ACCEPTED = "text_generation_spec_decode_accepted_tokens_total"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["", "linked"])
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    write_tokenizer(folder)
    async with serve(
        folder,
        limits=replace(LIMITS, max_input_tokens=150, max_total_tokens=250, vocab_size=UNKNOWN, drafts=True),
        chat_template=VERBATIM,
        build=lambda _: _engine(folder),
        linked=request.param,
    ) as running:
        yield running


def _engine(folder: Path) -> Engine:
    config = ShardConfig(model_path=str(folder), load_format="dummy", device="cpu", max_batch_size=8, speculate="8")
    engine = build_engine(config)
    draft_by(engine, ScriptedDrafts([], TINY_LLAMA["vocab_size"], predicted=1.0))  # type: ignore[arg-type]
    return engine


def asking(stack: Stack, says: str, **fields: object) -> Json:
    """Return a chat whose answer has letters only: its tokens are read again as they were."""
    letters = stack.tokenizer.encode_ids("cdefghijklmnop", add_special_tokens=False)
    sampled = {"seed": 3, "temperature": 1.0, "allowed_token_ids": list(letters), "max_tokens": NEW}
    return {"messages": [{"role": "user", "content": says}], **sampled, **fields}


def content(text: str) -> Json:
    return {"type": "content", "content": text}


def details(usage: Json, new: int = NEW) -> tuple[int, int]:
    """Return accepted and rejected tokens; checks the sums, with so many new tokens."""
    counted = usage["completion_tokens_details"]
    accepted, rejected = counted["accepted_prediction_tokens"], counted["rejected_prediction_tokens"]
    assert usage["completion_tokens"] == new + rejected
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return accepted, rejected


async def test_a_prediction_changes_no_text_and_usage_counts_its_tokens(stack: Stack) -> None:
    names = [f'{name}{{source="prediction"}}' for name in (DRAFTED, ACCEPTED)]
    plain = await post(stack.client, CHAT, asking(stack, "Edit it."))
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    text = whole(plain)["content"]
    assert len(text) == NEW
    edited = text[:20] + "zz" + text[23:]
    split = content(edited) | {"content": [{"type": "text", "text": part} for part in (edited[:9], edited[9:])]}
    counted: list[tuple[int, int]] = []
    for prediction in (content(text), content(edited), split, content("xyz" * 30)):
        body = asking(stack, "Edit it.", prediction=prediction)
        before = [stack.counted(name) for name in names]
        answer = await post(stack.client, CHAT, body)
        assert whole(answer)["content"] == text
        accepted, rejected = details(answer["usage"])
        assert [stack.counted(name) - was for name, was in zip(names, before, strict=True)] == [
            accepted + rejected, accepted,
        ]  # fmt: skip
        counted.append((accepted, rejected))
        streamed = await chunks(stack.client, CHAT, body | {"stream_options": {"include_usage": True}})
        assert joined(streamed)["content"] == text
        assert (details(streamed[-1]["usage"])[0] > 5) is (prediction["content"] != "xyz" * 30)
    (all_right, _), (edited_right, edited_wrong), (split_right, _), nothing = counted
    assert all_right > 20
    assert min(edited_right, split_right) > 5  # after the edit the answers before match longer
    assert edited_wrong > 0
    assert nothing == (0, 0)


async def test_the_answers_of_one_request_share_a_prediction(stack: Stack) -> None:
    plain = await post(stack.client, CHAT, asking(stack, "Edit it.", n=2))
    texts = [whole(plain, index)["content"] for index in range(2)]
    assert texts[0] != texts[1]
    predicted = await post(stack.client, CHAT, asking(stack, "Edit it.", n=2, prediction=content(texts[1])))
    assert [whole(predicted, index)["content"] for index in range(2)] == texts
    assert predicted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20


async def test_tokens_after_a_stop_string_are_rejected(stack: Stack) -> None:
    text = whole(await post(stack.client, CHAT, asking(stack, "Stop it.")))["content"]
    tried = 0
    for end in range(4, 40, 3):
        stop = text[end - 4 : end]
        asked = asking(stack, "Stop it.", stop=[stop], prediction=content(text), cache_salt=str(end))
        answer = await post(stack.client, CHAT, asked)
        before = text.index(stop)
        assert whole(answer)["content"] == text[:before]
        accepted, rejected = details(answer["usage"], new := before + len(stop))
        assert accepted < new  # the first one has no draft
        tried += rejected
    assert tried > 0


async def test_an_empty_prediction_has_no_tokens(stack: Stack) -> None:
    answer = await post(stack.client, CHAT, asking(stack, "Edit it.", prediction=content("")))
    assert details(answer["usage"]) == (0, 0)


async def test_a_prediction_has_as_many_tokens_as_a_sequence_at_most(stack: Stack) -> None:
    assert (await stack.ask(CHAT, asking(stack, "Hi", prediction=content("x" * 250)))).status == 200
    for characters in (251, 100_000):
        reply = await stack.ask(CHAT, asking(stack, "Hi", prediction=content("x " * (characters // 2) + "x")))
        assert reply.status == 400
        assert reply.body["error"]["param"] == "prediction"
        assert "`prediction` must have at most 250 tokens. Given: at least" in reply.body["error"]["message"]


async def test_a_prediction_has_tokens_of_the_model_only(stack: Stack) -> None:
    assert list(stack.tokenizer.encode_ids("ab", add_special_tokens=False)) == [UNKNOWN]
    reply = await stack.ask(CHAT, asking(stack, "Hi", prediction=content("xab")))
    assert reply.status == 400
    assert reply.body["error"]["param"] == "prediction"
    assert reply.body["error"]["message"].endswith(f"`prediction` has a token id that is not one of {UNKNOWN}")


async def test_a_prompt_has_tokens_of_the_model_only(stack: Stack) -> None:
    reply = await stack.ask("/generate", {"inputs": "xab"})
    assert reply.status == 422
    assert reply.body["error"].endswith(f"`inputs` has a token id that is not one of {UNKNOWN}")


async def test_bad_words_have_tokens_of_the_model_only(stack: Stack) -> None:
    reply = await stack.ask(CHAT, asking(stack, "Hi", bad_words=["ab"]))
    assert reply.status == 400
    assert reply.body["error"]["message"].endswith(f"`bad_words` has a token id that is not one of {UNKNOWN}")
