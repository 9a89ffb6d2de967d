"""Tools that measure a server: lm-eval against transformers, and three load generators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_environments import Environment, run
from stack import running
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.full]

LM_EVAL = Environment("lm_eval", ["lm_eval[api]==0.4.13", "transformers==5.23.0"])
AIPERF = Environment("aiperf", ["aiperf==0.13.0"])
GUIDELLM = Environment("guidellm", ["guidellm==0.8.1", "jinja2==3.1.6"], without=["torch"])
INFERENCE_PERF = Environment("inference_perf", ["inference-perf==0.7.0"], python=">=3.12")
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kazakhstan": "Astana",
    "Myanmar": "Naypyidaw",
    "Turkey": "Ankara",
    "Brazil": "Brasilia",
    "Australia": "Canberra",
}
OTHERS = ("Istanbul", "Sydney", "Almaty", "London")
TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": "{{cities}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(scope="module")
def echo_url(demo_model: Path) -> Iterator[str]:
    """The URL of a server that repeats prompts."""
    with running(demo_model) as stack:
        yield stack.url


def loglikelihoods(model: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Return the log-probability of each continuation of a context, by transformers, and whether it is greedy."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    computed = []
    for context, continuation in pairs:
        start = len(tokenizer.encode(context))
        tokens = torch.tensor([tokenizer.encode(context + continuation)])
        with torch.inference_mode():
            logprobs = reference(tokens).logits[0, start - 1 : -1].log_softmax(-1)
        target = tokens[0, start:]
        chosen = logprobs.gather(1, target[:, None]).sum().item()
        computed.append((chosen, bool((logprobs.argmax(-1) == target).all())))
    return computed


def test_lm_eval(demo_model: Path, tmp_path: Path) -> None:
    """Log-likelihoods are those of transformers in float32, within 0.001, and so is the accuracy; 8 prompts a request."""
    command = LM_EVAL.installed() / "lm_eval"
    documents = []
    for number, (country, capital) in enumerate(CAPITALS.items()):
        cities = sorted({capital, *OTHERS[:2], OTHERS[2 + number % 2]})
        documents.append({"country": country, "cities": cities, "answer": cities.index(capital)})
    data = tmp_path / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tmp_path / "capitals.yaml").write_text(json.dumps(task))
    with running(demo_model, "--dtype", "float32", engine="torch") as stack:
        options = {"model": "tgi", "base_url": f"{stack.url}/v1/completions", "tokenizer": demo_model}
        options |= {"tokenizer_backend": "huggingface", "tokenized_requests": True}
        arguments = ",".join(f"{name}={value}" for name, value in options.items())
        run(
            *(command, "run", "--model", "local-completions", "--model_args", arguments, "--batch_size", 8),
            *("--tasks", "capitals", "--include_path", tmp_path, "--output_path", tmp_path, "--log_samples"),
            cwd=tmp_path,
            HF_HUB_OFFLINE="1",
        )
    (lines,) = tmp_path.rglob("samples_capitals_*.jsonl")
    samples = sorted(map(json.loads, lines.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    pairs = [(asked["arg_0"], asked["arg_1"]) for sample in samples for asked in sample["arguments"].values()]
    served = [(float(value), greedy == "True") for sample in samples for ((value, greedy),) in sample["resps"]]
    computed = loglikelihoods(demo_model, pairs)
    assert len(served) == sum(len(document["cities"]) for document in documents)
    assert [value for value, _ in served] == pytest.approx([value for value, _ in computed], abs=1e-3)
    assert [greedy for _, greedy in served] == [greedy for _, greedy in computed]
    scores = iter([value for value, _ in computed])
    right = 0
    for document in documents:
        values = [next(scores) for _ in document["cities"]]
        right += values.index(max(values)) == document["answer"]
    assert 0 < right < len(documents), "an accuracy that any server has"
    assert sum(sample["acc"] for sample in samples) == right


@pytest.mark.parametrize("endpoint", ["chat", "completions", "huggingface-generate"])
def test_aiperf(endpoint: str, echo_url: str, demo_model: Path, tmp_path: Path) -> None:
    run(
        *(AIPERF.installed() / "aiperf", "profile", "-m", "tgi", "--url", echo_url, "--endpoint-type", endpoint),
        *("--streaming", "--tokenizer", demo_model, "--request-count", 8, "--concurrency", 2, "--isl", 20, "--osl", 8),
        *("--ui", "none", "--output-artifact-dir", tmp_path / "out"),
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert (report["completed_request_count"]["avg"], report["request_error_rate"]["avg"]) == (8, 0)
    assert report["time_to_first_token"]["avg"] > 0
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{echo_url}/metrics"]


def test_guidellm(echo_url: str, demo_model: Path, tmp_path: Path) -> None:
    run(
        *(GUIDELLM.installed() / "guidellm", "run", "--backend", f"kind=openai_http,target={echo_url}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=6", "--disable-console"),
        *("--tokenizer", f"kind=huggingface_auto,model={demo_model}"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path}/report.json"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)


@pytest.mark.parametrize("kind", ["tgi", "vllm"])
def test_inference_perf(kind: str, echo_url: str, demo_model: Path, tmp_path: Path) -> None:
    def lengths(least: int, most: int) -> dict[str, Any]:
        return {"min": least, "max": most, "mean": (least + most) // 2, "std_dev": 1, "total_count": 8}

    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": lengths(10, 20), "output_distribution": lengths(8, 8)},
        "load": {"type": "constant", "stages": [{"rate": 4, "duration": 2}], "num_workers": 1},
        "server": {"type": kind, "model_name": "tgi", "base_url": echo_url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(demo_model)},
        "storage": {"local_storage": {"path": str(tmp_path / "out")}},
    }
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    run(INFERENCE_PERF.installed() / "inference-perf", "-c", tmp_path / "settings.yaml", cwd=tmp_path)
    report = json.loads((tmp_path / "out" / "summary_lifecycle_metrics.json").read_text())
    assert (report["successes"]["count"], report["failures"]["count"]) == (8, 0)
