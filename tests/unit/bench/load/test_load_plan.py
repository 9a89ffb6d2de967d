"""Load and measures of text-generation-benchmark: arrivals, lengths, prompts, quantiles, goodput, bad flags and files."""

from __future__ import annotations

import json
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from text_generation_bench.load.client import ClientReport, RequestTimes
from text_generation_bench.load.compare import comparison, ratios
from text_generation_bench.load.measures import client_warning, level_result
from text_generation_bench.load.report import report_page
from text_generation_bench.load.search import MAX_LEVELS, found, planned
from text_generation_bench.load.settings import LoadSettings, parse_settings
from text_generation_bench.load.workload import Level, PlannedChat, Share, Workload, levels

LEVEL = Level(0, "4", 4, is_open_loop=False)


def plan(*flags: str, index: int = 0, processes: int = 1) -> list[PlannedChat]:
    """Return the first chats of the first level of a process."""
    settings = parse_settings([*flags, "--seed", "3"])
    workload, level = Workload(settings, Share(index, processes)), levels(settings)[0]
    return list(islice(workload.open(level) if level.is_open_loop else workload.closed(level), 20_000))


def test_the_processes_share_a_level_and_the_seed_decides_it() -> None:
    flags = ("--dialect", "openai", "--rate", "100", "--duration", "20")
    parts = [[chat.at for chat in plan(*flags, index=index, processes=3)] for index in range(3)]
    assert sorted(at for part in parts for at in part) == [chat.at for chat in plan(*flags)]
    assert sum(map(len, parts)) == pytest.approx(2000, rel=0.1)
    closed = [plan("--dialect", "openai", "-b", "4", "-r", "5", index=index, processes=3) for index in range(3)]
    assert [len(chats) for chats in closed] == [7, 7, 6]
    texts = [str(chat.turns) for chats in closed for chat in chats]
    assert len(set(texts)) == 20


def test_arrivals_keep_their_rate(tmp_path: Path) -> None:
    constant = [chat.at for chat in plan("--rate", "10", "--arrival", "constant", "--requests", "4")]
    assert constant == pytest.approx([0, 0.1, 0.2, 0.3])
    bursts = [chat.at for chat in plan("--rate", "10", "--arrival", "burst", "--burst-size", "2", "--requests", "4")]
    assert bursts == pytest.approx([0, 0, 0.2, 0.2])
    gaps = [chat.at for chat in plan("--rate", "10", "--requests", "4000")]
    assert statistics.stdev(b - a for a, b in pairwise(gaps)) == pytest.approx(0.1, rel=0.1)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 3000, "input_length": 3, "output_length": 9}\n{"timestamp": 1000}\n')
    chats = plan("--trace", str(trace), "--time-scale", "0.001", "-s", "5", "-d", "6")
    assert [(chat.at, len(str(chat.turns[0][0]).split()), chat.turns[0][1]) for chat in chats] == [(0, 5, 6), (2, 3, 9)]


def test_prompts_have_exactly_the_tokens_that_were_asked_for(demo_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    chats = plan("-t", str(demo_model), "-b", "8", "-s", "123", "--dialect", "openai")
    assert {len(tokenizer.encode(chat.turns[0][0]).ids) for chat in chats} == {123}
    ids = plan("-b", "8", "-s", "123", "--dialect", "openai", "--vocab-size", "400")
    assert {len(chat.turns[0][0]) for chat in ids} == {123}
    assert all(200 <= token < 400 for chat in ids for token in chat.turns[0][0])


def test_chats_share_their_system_prompts_and_lengths_follow_sharegpt() -> None:
    chats = plan("-b", "8", "-r", "8", "--turns", "3", "--system-length", "50", "--system-prompts", "2")
    assert {len(chat.turns) for chat in chats} == {3}
    assert len({str(chat.system) for chat in chats}) == 2
    assert {len(str(chat.system).split()) for chat in chats} == {50}
    lengths = plan("-b", "8", "--requests", "4000", "--lengths", "sharegpt", "-s", "100000", "-d", "100000")
    assert statistics.fmean(len(str(chat.turns[0][0]).split()) for chat in lengths) == pytest.approx(161, rel=0.1)
    assert statistics.fmean(chat.turns[0][1] for chat in lengths) == pytest.approx(338, rel=0.1)
    cut = plan("-b", "8", "--requests", "400", "--lengths", "sharegpt", "-s", "64", "-d", "32")
    assert max(chat.turns[0][1] for chat in cut) == 32


DATASETS = {
    "sharegpt": [{"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "a b"}, {"from": "human", "value": "two"}]}],
    "messages": [{"messages": [{"role": "system", "content": "sys"}, {"role": "user", "content": "one"}], "output_length": 7}],
    "prompt": [{"prompt": "one", "output_length": 7}, {"no": "prompt"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "turns", "system"),
    [("sharegpt", [("one", 5), ("two", 5)], ""), ("messages", [("one", 7)], "sys"), ("prompt", [("one", 7)], "")],
)
def test_datasets_give_prompts_and_lengths(name: str, turns: list[Any], system: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    for text in (json.dumps(DATASETS[name]), "\n".join(map(json.dumps, DATASETS[name]))):
        file.write_text(text)
        chats = plan("--dataset", str(file), "--turns", "2", "-d", "5", "-b", "2")
        assert len(chats) == 20
        assert (chats[0].turns, chats[0].system) == (turns, system)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--url", "ftp://x"), "--url: must begin with http"),
        (("--url", "http://[::1"), "--url: Invalid IPv6 URL"),
        (("--url", "http://user:word@host"), "belong into --header"),
        (("-b", "0"), "must be above 0"),
        (("--rate", "nan"), "must be above 0 and finite"),
        (("-b", "x"), "-b"),
        (("-b", "1", "--rate", "2"), "only one of --batch-size, --rate"),
        (("--itl-target", "nan"), "--itl-target"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--header", "a\r\nb: c"), "--header"),
        (("--output", "/no/such/folder/x"), "no folder /no/such/folder"),
        (("--dataset", "/no/such"), "--dataset: /no/such: No such file"),
        (("--dataset", "{empty}"), "no records"),
        (("--trace", "{words}"), "no JSON"),
        (("--trace", "{numbers}"), "a record is no JSON object"),
        (("--trace", "{object}"), "no number as timestamp"),
        (("--dataset", "{object}"), "no record has a prompt"),
        (("-t", "no-such/model"), "no tokenizer.json at no-such/model"),
        (("-t", "{words}"), "--tokenizer-name"),
    ],
)
def test_bad_flags_and_files_are_one_line(
    flags: tuple[str, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"empty": "", "words": "some words", "numbers": "1\n2", "object": '{"a": 1}'}.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / flag[1:-1]) if flag.startswith("{") else flag for flag in flags]
    with pytest.raises(SystemExit) as exited:
        plan(*given)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("text-generation-benchmark: error: ")
    assert error in lines[0]
    assert exited.value.code in (1, 2)


def request(start: float, ttft: float, gaps: list[float], error: str = "", late: float = 0.0) -> RequestTimes:
    tokens = 2 * (len(gaps) + 1)
    return RequestTimes(start, late, ttft, ttft + sum(gaps), tokens, len(gaps) + 1, gaps, 10, None, error=error)


def result(requests: list[RequestTimes], cpu: float = 0.1, **targets: float) -> dict[str, Any]:
    reports = [
        ClientReport(requests[:1], {0: 3}, cpu, [0.0], 100.0, 104.0),
        ClientReport(requests[1:], {0: 4, 2: 1}, 0.05, [0.001], 101.0, 110.0),
    ]
    return level_result(LEVEL, reports, targets)


def test_a_level_is_measured_from_all_processes() -> None:
    found = result([request(0.2, 0.1, [0.01, 0.03]), request(0.1, 0.3, [0.02] * 9), request(0.5, 9.0, [9.0], error="503: no")],
                   ttft=0.2, itl=0.05)  # fmt: skip
    assert (found["requests"], found["errors"], found["error_texts"]) == (3, 1, {"503: no": 1})
    assert found["seconds"] == 10.0
    assert found["tokens_per_s"] == pytest.approx((6 + 20) / 10)
    assert found["requests_per_s"] == pytest.approx(0.2)
    assert found["events_per_token"] == 0.5
    assert (found["ttft"]["count"], found["ttft"]["p50"], found["ttft"]["max"]) == (2, 0.3, 0.3)
    assert (found["itl"]["p50"], found["itl"]["p99"], found["itl"]["min"]) == (0.02, 0.03, 0.01)
    assert found["tpot"]["min"] == pytest.approx(0.04 / 5)
    assert found["prompt_tokens"] == 20
    assert found["cached_tokens"] is None
    assert found["events_by_second"] == [7, 0, 1]
    assert found["goodput"] == {"requests": 1, "requests_per_s": 0.1, "share": pytest.approx(1 / 3, abs=1e-6)}
    assert [row["start"] for row in found["per_request"]] == [0.1, 0.2, 0.5]


def test_goodput_holds_each_target() -> None:
    one = [request(0.0, 0.1, [0.01] * 98 + [0.5, 0.5])]
    assert result(one, ttft=0.1)["goodput"]["requests"] == 1
    assert result(one, itl=0.1)["goodput"]["requests"] == 0
    assert result(one, tpot=0.011)["goodput"]["requests"] == 1
    assert result(one, latency=2.0)["goodput"]["requests"] == 0


def test_a_client_at_its_limit_is_called_the_bottleneck() -> None:
    assert client_warning(result([request(0, 1, [1.0])])) == ""
    assert "99% of a core" in client_warning(result([request(0, 1, [1.0])], cpu=0.99))
    assert "50 ms late" in client_warning(result([request(0, 1, [1.0], late=0.05)]))


def content(texts: list[RequestTimes], **settings: object) -> dict[str, Any]:
    """Return the content of a result file."""
    public = parse_settings(["--seed", "1"]).public() | {"model": "</script><b>m"} | settings
    return {"settings": public, "server": {}, "environment": {"client": "0", "python": "3", "cores": 2, "system": "x"},
            "targets": {}, "interrupted": False, "time": "t", "levels": [result(texts)]}  # fmt: skip


def test_a_comparison_has_ratios_and_names_what_differs() -> None:
    slow, fast = content([request(0, 0.4, [0.2])]), content([request(0, 0.1, [0.1])], decode_length=99)
    results = [("slow", slow), ("fast", fast)]
    ((title, head, rows),) = ratios(results)
    assert title.startswith(
        "fast divided by slow; they differ in --decode-length. Warning: a p99 of fewer than 100 values "
    )
    found = dict(zip(head, rows[0], strict=True))
    assert (found["TTFT p50"], found["ITL p50"], found["tokens/s"]) == ("0.250", "0.500", "1.000")
    assert found["TTFT p99"].endswith("?")
    assert title in comparison(results)


def test_a_report_loads_nothing_and_its_texts_are_inert() -> None:
    page = report_page(
        [("", content([request(0, 0.1, [0.1]), request(0, 1, [1.0], error="<script>alert(1)</script>")]))]
    )
    assert "default-src 'none'" in page
    assert "</script><b>m" not in page
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not [word for word in ("{{", "src=", "href=", "@import", "url(") if word in page.replace("src 'none'", "")]


def test_settings_in_the_result_have_no_secret() -> None:
    settings = parse_settings(["--api-key", "sesame", "--header", "x-key: sesame", "--seed", "1"])
    assert settings.headers == {"Authorization": "Bearer sesame", "x-key": "sesame"}
    assert "sesame" not in json.dumps(settings.public())
    assert isinstance(settings, LoadSettings)


@pytest.mark.parametrize("dialect", ["openai", "openai-chat"])
def test_prompts_of_a_trace_share_the_blocks_that_their_hash_ids_name(dialect: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    records = [([0, 1, 2, 3], 2000), ([0, 1, 2, 4], 2048), ([0, 5], 600)]
    trace.write_text("".join(json.dumps({"timestamp": at, "input_length": length, "hash_ids": ids}) + "\n"
                             for at, (ids, length) in enumerate(records)))  # fmt: skip
    prompts = []
    for index in range(2):
        for chat in plan("--dialect", dialect, "--trace", str(trace), index=index, processes=2):
            text = chat.turns[0][0]
            prompts.append((chat.at, text if isinstance(text, list) else text.split()))
    first, second, third = (prompt for _, prompt in sorted(prompts, key=lambda pair: pair[0]))
    assert [len(first), len(second), len(third)] == [2000, 2048, 600]
    assert first[:1536] == second[:1536]
    assert first[1536:] != second[1536:2000]
    assert third[:512] == first[:512]
    assert third[512:] != first[512:600]


@pytest.mark.parametrize("capacity", [0.3, 7.0, 37.0, 0.0])
def test_a_search_finds_the_highest_rate_that_holds_the_targets(capacity: float) -> None:
    settings = parse_settings(["--search-rate", "2", "--ttft-target", "100"])
    results: list[dict[str, Any]] = []
    for level in planned(settings, results):
        share = 1.0 if level.value <= capacity else 0.9
        results.append({"value": level.value, "requests": 50, "goodput": {"share": share}})
    assert len(results) <= MAX_LEVELS
    rate, fails_at = found(settings, results)["rate"], found(settings, results)["fails_at"]
    assert fails_at is not None
    if capacity:
        assert rate is not None
        assert rate <= capacity < fails_at <= 1.05 * rate
    else:
        assert rate is None


def test_sessions_of_agents_are_drawn_by_seed_and_read_from_a_trace(tmp_path: Path) -> None:
    arguments = ["--dialect", "openai-chat", "--scenario", "agents", "-s", "2000", "--seed", "4", "-b", "2", "-r", "3"]

    def sessions(*more: str) -> list[PlannedChat]:
        settings = parse_settings([*arguments, *more])
        return list(Workload(settings, Share(0, 1)).closed(levels(settings)[0]))

    drawn = sessions()
    assert len(drawn) == 6
    assert drawn == sessions()
    assert len({chat.session for chat in drawn}) == 6
    assert len({chat.system for chat in drawn}) == 1, "they share their instructions"
    assert any(chat.subagents for chat in drawn)
    for chat in drawn:
        assert len(chat.turns) == len(chat.pauses) > 1
        assert all(each.session == chat.session for agents in chat.subagents.values() for each in agents)
    request = {"t": 0, "type": "n", "in": 100, "out": 7, "hash_ids": [1, 2]}
    other = {"t": 9, "type": "n", "in": 60, "out": 5, "hash_ids": [3], "think_time": 2.0}
    child = {"t": 1, "type": "subagent", "requests": [request]}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"block_size": 64, "requests": [request, child, other]}))
    first, *_ = sessions("--trace", str(trace))
    assert [new for _, new in first.turns] == [7, 5]
    assert (list(first.pauses), first.resets) == ([0.0, 2.0], {1})
    assert [each.turns[0][1] for each in first.subagents[1]] == [7]
