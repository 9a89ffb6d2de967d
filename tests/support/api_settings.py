"""Settings and metrics of the HTTP API for tests."""

from __future__ import annotations

from pathlib import Path

from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.keys import ApiKeys
from text_generation_router.config import RouterConfig
from text_generation_router.metrics import Metrics
from text_generation_router.rate_limits import RateCounter
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler


def api_settings(limits: Limits, **values: object) -> Settings:
    """Settings with these values: fields of RouterConfig or of Settings. Headers of callers count by default."""
    values = {"trust_caller_headers": True, **values}
    own = {name: value for name, value in values.items() if name not in RouterConfig.model_fields}
    config = RouterConfig.of(**{name: values[name] for name in values.keys() - own.keys()})
    return Settings(limits, config, ApiKeys(config), "0.0.0", **own)  # type: ignore[arg-type]


def api_keys(*keys: str, file: Path | None = None, trusted: bool = False, rates: RateCounter | None = None) -> ApiKeys:
    """The keys of a server; `trusted`: headers of callers without a key count."""
    config = RouterConfig(api_key=keys, api_keys_file=str(file or ""), trust_caller_headers=trusted)
    return ApiKeys(config, rates)


def api_metrics() -> Metrics:
    """The metrics of a server without work."""
    return Metrics(max_input_tokens=100, max_total_tokens=200, scheduler=Scheduler(Policy(1, 1)))
