"""The measures of a level, from the times of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from text_generation_bench.load.client import ClientReport, RequestTimes
from text_generation_bench.load.workload import Level

SHARES = (0.5, 0.9, 0.95, 0.99)
ITL_SHARE = 0.99
"""A request holds the target of --itl-target if this share of its times between events does."""
SESSION_SHARE = 0.9
"""Share of the requests of a session that must hold the targets."""
BUSY = 0.85
"""Share of a core from which on the client is called the bottleneck."""
LATE_S = 0.01
"""Delay of the event loop, or of a request in an open loop, from which on the client is called the bottleneck."""
MAX_ERROR_TEXTS = 20
POINTS = 200
"""Most points of a distribution in the result file."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at index floor(share · n) of the sorted values, as TGI's benchmark does; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def distribution(values: Sequence[float]) -> dict[str, Any]:
    """Return count, mean, extremes and quantiles, and the points of the cumulative distribution."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    last = len(ordered) - 1
    points = min(POINTS, len(ordered))
    return {
        "count": len(ordered),
        "mean": _rounded(math.fsum(ordered) / len(ordered)),
        "min": _rounded(ordered[0]),
        "max": _rounded(ordered[-1]),
        **{f"p{share * 100:g}": _rounded(ordered[min(last, int(share * len(ordered)))]) for share in SHARES},
        "cumulative": [_rounded(ordered[round(at * last / max(points - 1, 1))]) for at in range(points)],
    }


def _rounded(value: float) -> float:
    return round(value, 7)


def request_row(request: RequestTimes) -> dict[str, Any]:
    """Return what the result file says of a request; its times between events as mean and quantiles."""
    gaps = request.gaps
    row: dict[str, Any] = {
        "start": _rounded(request.start),
        "late": _rounded(request.late),
        "ttft": None if request.ttft is None else _rounded(request.ttft),
        "latency": _rounded(request.latency),
        "tokens": request.tokens,
        "events": request.events,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "turn": request.turn,
        "tpot": _none_or(tpot(request)),
        "itl_p50": _none_or(quantile(gaps, 0.5)),
        "itl_p99": _none_or(quantile(gaps, ITL_SHARE)),
    }
    return row | ({"error": request.error} if request.error else {})


def _none_or(value: float) -> float | None:
    return None if math.isnan(value) else _rounded(value)


def tpot(request: RequestTimes) -> float:
    """Return the mean time per token after the first event; NaN for a single event."""
    if request.tokens < 2 or not request.gaps:
        return math.nan
    return math.fsum(request.gaps) / (request.tokens - 1)


def is_good(request: RequestTimes, targets: Mapping[str, float]) -> bool:
    """Return True if a request holds all targets, in seconds."""
    if request.error or request.ttft is None:
        return False
    times = {"ttft": request.ttft, "latency": request.latency, "tpot": tpot(request)}
    if "itl" in targets:
        times["itl"] = quantile(request.gaps, ITL_SHARE)
    # NaN: a single token has no times between tokens, and holds their targets.
    return not any(times[name] > target for name, target in targets.items())


def level_result(level: Level, reports: Sequence[ClientReport], targets: Mapping[str, float]) -> dict[str, Any]:
    """Return the measures of a level."""
    requests = sorted((request for report in reports for request in report.requests), key=lambda request: request.start)
    good = [request for request in requests if not request.error]
    seconds = max(report.ended for report in reports) - min(report.began for report in reports)
    seconds = max(seconds, 1e-9)
    tokens, events = sum(request.tokens for request in good), sum(request.events for request in good)
    by_second: Counter[int] = Counter()
    for report in reports:
        by_second.update(report.tokens_by_second)
    errors = Counter(request.error for request in requests if request.error)
    result = {
        "level": level.name,
        "value": level.value,
        "open_loop": level.is_open_loop,
        "seconds": _rounded(seconds),
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "error_texts": _texts(errors),
        "tokens": tokens,
        "tokens_counted": all(request.is_counted for request in good),
        "prompt_tokens": _sum(request.prompt_tokens for request in good),
        "cached_tokens": _sum(request.cached_tokens for request in good),
        "tokens_per_s": _rounded(tokens / seconds),
        "requests_per_s": _rounded(len(good) / seconds),
        "events_per_token": _rounded(events / max(tokens, 1)),
        "ttft": distribution([request.ttft for request in good if request.ttft is not None]),
        "itl": distribution([gap for request in good for gap in request.gaps]),
        "tpot": distribution([value for request in good if not math.isnan(value := tpot(request))]),
        "latency": distribution([request.latency for request in good]),
        "events_by_second": [by_second[second] for second in range(max(by_second, default=-1) + 1)],
        "client": _client(reports, requests),
    }
    if targets:
        held = sum(is_good(request, targets) for request in requests)
        result["goodput"] = {
            "requests": held,
            "requests_per_s": _rounded(held / seconds),
            "share": _rounded(held / max(len(requests), 1)),
        }
    if any(request.session for request in requests):
        result["agents"] = _agents(requests, targets)
    return result | {"per_request": [request_row(request) for request in requests]}


def _agents(requests: Sequence[RequestTimes], targets: Mapping[str, float]) -> dict[str, Any]:
    """Return the measures of sessions. One is served if a share of SESSION_SHARE of its requests holds all targets."""
    sessions: dict[str, list[bool]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(is_good(request, targets))
    per_token = [request.latency / request.tokens for request in requests if request.tokens and not request.error]
    known = [request for request in requests if request.prompt_tokens is not None and not request.error]
    cached, sent = sum(each.cached_tokens or 0 for each in known), sum(each.prompt_tokens or 0 for each in known)
    return {
        "seconds_per_token": distribution(per_token),
        "hit_rate": _rounded(cached / max(sent, 1)),
        "sessions": len(sessions),
        "served": sum(sum(held) >= SESSION_SHARE * len(held) for held in sessions.values()),
    }


def _client(reports: Sequence[ClientReport], requests: Sequence[RequestTimes]) -> dict[str, float]:
    lags = [lag for report in reports for lag in report.lags]
    return {
        "processes": len(reports),
        "cpu": _rounded(max(report.cpu for report in reports)),
        "lag_p90": _none_or(quantile(lags, 0.9)) or 0.0,
        "late_p99": _none_or(quantile([request.late for request in requests], 0.99)) or 0.0,
    }


def client_warning(result: Mapping[str, Any]) -> str:
    """Return the reason why the client may have been the bottleneck; empty if it was not."""
    client = result["client"]
    if client["cpu"] >= BUSY:
        return f"the busiest client process used {client['cpu']:.0%} of a core"
    if client["late_p99"] >= LATE_S:
        return f"requests were sent up to {client['late_p99'] * 1e3:.0f} ms late (p99)"
    if client["lag_p90"] >= LATE_S:
        return f"the client's event loop was up to {client['lag_p90'] * 1e3:.0f} ms late (p90)"
    return ""


def _texts(errors: Counter[str]) -> dict[str, int]:
    texts = dict(errors.most_common(MAX_ERROR_TEXTS))
    if left := errors.total() - sum(texts.values()):
        texts["other errors"] = left
    return texts


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
