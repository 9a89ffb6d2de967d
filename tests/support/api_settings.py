"""Settings of the HTTP API for tests."""

from __future__ import annotations

from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.keys import ApiKeys
from text_generation_router.config import RouterConfig


def api_settings(limits: Limits, **values: object) -> Settings:
    """Settings with these values: fields of RouterConfig or of Settings. Headers of callers count by default."""
    values = {"trust_caller_headers": True, **values}
    own = {name: value for name, value in values.items() if name not in RouterConfig.model_fields}
    config = RouterConfig.of(**{name: values[name] for name in values.keys() - own.keys()})
    return Settings(limits, config, ApiKeys.of(config), "0.0.0", **own)  # type: ignore[arg-type]
