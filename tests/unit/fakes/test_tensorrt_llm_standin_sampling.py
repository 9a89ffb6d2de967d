"""The stand-in for tensorrt_llm: what each sampler honours and what it drops in silence, logprobs, and guided decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from standin_loading import Standin

PROMPT = [5, 6, 7, 8]
LONG = list(range(100, 164))
SAMPLED = {"temperature": 1.0, "max_tokens": 40}


async def tokens(result: Any) -> list[int]:  # noqa: ANN401 - a RequestOutput
    """Its first sequence's tokens, at the end."""
    return list((await result).outputs[0].token_ids)


def samplers(standin: Standin) -> list[tuple[dict[str, str], bool]]:
    """Arguments that choose each sampler of a release, and whether it honours what 1.2's default one drops."""
    if standin.version == "1.3":
        return [({}, True)]
    return [({}, False), ({"sampler_type": "TorchSampler"}, False), ({"sampler_type": "TRTLLMSampler"}, True)]


class TestWhatIsHonoured:
    async def test_nothing_set_is_greedy_and_a_temperature_is_not(self, standin: Standin) -> None:
        llm = standin.llm()
        echo = (LONG * 2)[:40]
        for greedy in ({}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.0}):
            assert await tokens(llm.generate_async(LONG, standin.params(max_tokens=40, **greedy))) == echo
        for sampled in ({"temperature": 1.0}, {"top_p": 1.0}, {"top_k": 0}):
            answer = await tokens(llm.generate_async(LONG, standin.params(max_tokens=40, **sampled)))
            assert answer != echo
            assert set(answer) <= set(LONG)

    async def test_top_k_keeps_to_the_most_probable(self, standin: Standin) -> None:
        answer = await tokens(standin.llm().generate_async(LONG, standin.params(top_k=2, **SAMPLED)))
        assert all(token in (LONG[i % 64], LONG[(i + 1) % 64]) for i, token in enumerate(answer))

    async def test_a_seed_repeats_an_answer_only_where_it_is_honoured(self, standin: Standin) -> None:
        for arguments, is_honoured in samplers(standin):
            llm = standin.llm(**arguments)
            answers = [await tokens(llm.generate_async(LONG, standin.params(seed=7, **SAMPLED))) for _ in range(2)]
            other = await tokens(llm.generate_async(LONG, standin.params(seed=8, **SAMPLED)))
            assert (answers[0] == answers[1]) is is_honoured
            assert other != answers[0]

    async def test_without_a_seed_the_old_samplers_answers_are_all_the_same(self, old: Standin) -> None:
        llm = old.llm(sampler_type="TRTLLMSampler")
        first, second = [await tokens(llm.generate_async(LONG, old.params(**SAMPLED))) for _ in range(2)]
        assert first == second == await tokens(llm.generate_async(LONG, old.params(seed=0, **SAMPLED)))

    @pytest.mark.parametrize(
        "penalty", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
    )
    async def test_penalties_avoid_repeats_only_where_they_are_honoured(
        self, standin: Standin, penalty: dict[str, float]
    ) -> None:
        for arguments, is_honoured in samplers(standin):
            params = standin.params(max_tokens=6, **penalty)
            answer = await tokens(standin.llm(**arguments).generate_async([5, 5, 6, 6, 7, 8], params))
            assert answer == ([5, 6, 7, 8, 7, 8] if is_honoured else [5, 5, 6, 6, 7, 8])

    async def test_min_p_narrows_the_choice_only_where_it_is_honoured(self, standin: Standin) -> None:
        for arguments, is_honoured in samplers(standin):
            params = standin.params(min_p=0.9, **SAMPLED)
            answer = await tokens(standin.llm(**arguments).generate_async(LONG, params))
            assert (answer == LONG[:40]) is is_honoured

    async def test_bad_tokens_are_left_out_only_where_they_are_honoured(self, standin: Standin) -> None:
        for arguments, is_honoured in samplers(standin):
            params = standin.params(bad_token_ids=[6], max_tokens=3)
            answer = await tokens(standin.llm(**arguments).generate_async(PROMPT, params))
            assert answer == ([5, 7, 7] if is_honoured else [5, 6, 7])

    async def test_min_tokens_puts_ends_off(self, standin: Standin) -> None:
        llm = standin.llm()
        params = standin.params(end_id=6, stop_token_ids=[8], min_tokens=4, max_tokens=20)
        output = (await llm.generate_async(PROMPT, params)).outputs[0]
        assert (list(output.token_ids), output.finish_reason) == ([5, 7, 7, 5, 5, 6], "stop")

    async def test_min_p_alone_makes_it_sampling_only_on_main(self, standin: Standin) -> None:
        answer = await tokens(standin.llm().generate_async(LONG, standin.params(min_p=0.1, max_tokens=40)))
        assert (answer == LONG[:40]) is (standin.version == "1.2")

    async def test_bias(self, standin: Standin) -> None:
        llm = standin.llm()
        bias = [0.0] * 16
        bias[6], bias[13] = -100.0, 100.0
        assert await tokens(llm.generate_async(PROMPT, standin.params(embedding_bias=bias, max_tokens=3))) == [13] * 3
        bias[13] = 0.0
        assert await tokens(llm.generate_async(PROMPT, standin.params(embedding_bias=bias, max_tokens=3))) == [5, 7, 7]

    async def test_what_is_not_imitated_is_refused(self, standin: Standin) -> None:
        llm = standin.llm()
        with pytest.raises(standin.request_error, match="does not imitate return_context_logits"):
            await llm.generate_async(PROMPT, standin.params(return_context_logits=True))
        with pytest.raises(NotImplementedError, match="lora_request"):
            llm.generate_async(PROMPT, standin.params(), lora_request=object())


class TestLogprobs:
    async def test_none_unless_asked_for(self, standin: Standin) -> None:
        output = (await standin.llm().generate_async(PROMPT, standin.params())).outputs[0]
        assert (output.logprobs, output.prompt_logprobs, output.cumulative_logprob) == ([], [], None)

    async def test_zero_asks_for_the_chosen_tokens_only_on_main(self, standin: Standin) -> None:
        output = (await standin.llm().generate_async(PROMPT, standin.params(logprobs=0, max_tokens=2))).outputs[0]
        assert [list(entry) for entry in output.logprobs] == ([] if standin.version == "1.2" else [[5], [6]])

    async def test_they_grow_with_the_tokens(self, standin: Standin) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(logprobs=2, max_tokens=4), streaming=True)
        async for item in result:
            output = item.outputs[0]
            assert len(output.logprobs) == len(output.token_ids)
            for token, entry in zip(output.token_ids, output.logprobs, strict=True):
                assert list(entry) == [token, token + 1]
                assert [e.rank for e in entry.values()] == [1, 2]
                assert [e.logprob for e in entry.values()] == pytest.approx([-0.5, -1.2])
            assert output.cumulative_logprob == pytest.approx(-0.5 * output.length)

    async def test_a_token_that_is_not_among_the_most_probable_comes_first_all_the_same(self, standin: Standin) -> None:
        params = standin.params(logprobs=2, **SAMPLED)
        output = (await standin.llm().generate_async(LONG, params)).outputs[0]
        outside = 0
        for position, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert next(iter(entry)) == token
            if token not in (LONG[position], LONG[position] + 1):
                outside += 1
                assert (len(entry), entry[token].rank) == (3, 3)
        assert outside

    async def test_plain_numbers(self, new: Standin) -> None:
        params = new.params(logprobs=0, logprobs_simple_format=True, max_tokens=3)
        assert (await new.llm().generate_async(PROMPT, params)).outputs[0].logprobs == [-0.5] * 3

    async def test_prompt_rows_tell_of_the_token_after(self, standin: Standin) -> None:
        output = (await standin.llm().generate_async([5, 6, 6, 7], standin.params(prompt_logprobs=2))).outputs[0]
        rows = [list(row) for row in output.prompt_logprobs]
        # The third token repeats the second, which nothing expects; the last row tells of the first token generated.
        surprise = [7, 8] if standin.version == "1.2" else [6, 7, 8]
        assert rows == [[6, 7], surprise, [7, 8], [5, 6]]

    async def test_a_cached_prompt_has_rows_for_the_rest_alone(self, standin: Standin) -> None:
        llm = standin.llm(kv_cache_config={"tokens_per_block": 16})
        rows = []
        for salt in ("a", "a", "b"):
            output = (await llm.generate_async(LONG, standin.params(prompt_logprobs=1), cache_salt=salt)).outputs[0]
            rows.append(len(output.prompt_logprobs))
        assert rows == [64, 16, 64]

    async def test_a_cancelled_request_may_lack_one_only_at_1_2(
        self, standin: Standin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRTLLM_STANDIN_CANCEL_WITH_TOKEN", "1")
        monkeypatch.setenv("TRTLLM_STANDIN_STEP_MS", "1")
        result = standin.llm().generate_async(PROMPT, standin.params(logprobs=1, max_tokens=20_000), streaming=True)
        await anext(result)
        result.abort()
        if standin.version == "1.2":
            with pytest.raises(AssertionError, match="logprobs length"):
                await result
        else:
            assert (await result).outputs[0].finish_reason == "cancelled"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class TestGuides:
    async def answer(self, standin: Standin, folder: Path, backend: str, **guide: object) -> str:
        """What an answer within the guide says."""
        llm = standin.llm(folder, skip_tokenizer_init=False, guided_decoding_backend=backend)
        params = standin.params(
            end_id=0,
            max_tokens=200,
            guided_decoding=standin.find("tensorrt_llm.llmapi", "GuidedDecodingParams")(**guide),
        )
        output = (await llm.generate_async(llm.tokenizer.encode("abc 12"), params)).outputs[0]
        assert (output.finish_reason, output.token_ids[-1]) == ("stop", 0)
        return str(llm.tokenizer.decode(output.token_ids))

    @pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["as a dictionary", "as text"])
    async def test_a_schema(self, standin: Standin, model_folder: Path, schema: object) -> None:
        found = json.loads(await self.answer(standin, model_folder, "xgrammar", json=schema))
        assert isinstance(found["name"], str)
        assert isinstance(found["age"], int)

    async def test_any_object(self, standin: Standin, model_folder: Path) -> None:
        assert isinstance(json.loads(await self.answer(standin, model_folder, "llguidance", json_object=True)), dict)

    async def test_an_expression(self, standin: Standin, model_folder: Path) -> None:
        assert await self.answer(standin, model_folder, "xgrammar", regex="(yes|no) sir") in ("yes sir", "no sir")

    @pytest.mark.parametrize(
        ("backend", "grammar"), [("llguidance", 'start: "ba" | "ca"'), ("xgrammar", 'root ::= "ba" | "ca"')]
    )
    async def test_a_grammar_as_the_backend_writes_it(
        self, standin: Standin, model_folder: Path, backend: str, grammar: str
    ) -> None:
        assert await self.answer(standin, model_folder, backend, grammar=grammar) in ("ba", "ca")

    async def test_one_that_cannot_be_used_fails_its_request(self, standin: Standin, model_folder: Path) -> None:
        with pytest.raises(standin.request_error, match="LLGuidance matcher error"):
            await self.answer(standin, model_folder, "xgrammar", regex="(")

    def test_without_a_tokenizer_the_engine_is_not_built(self, standin: Standin, model_folder: Path) -> None:
        with pytest.raises(RuntimeError, match="Executor worker returned error") as caught:
            standin.llm(model_folder, guided_decoding_backend="xgrammar")
        assert isinstance(caught.value.__cause__, AssertionError)

    async def test_without_a_backend_it_is_dropped_in_silence(self, standin: Standin) -> None:
        guide = standin.find("tensorrt_llm.llmapi", "GuidedDecodingParams")(regex="a")
        params = standin.params(guided_decoding=guide, max_tokens=3)
        assert await tokens(standin.llm().generate_async(PROMPT, params)) == [5, 6, 7]
