"""Settings of the HTTP API for tests."""

from __future__ import annotations

from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.caller import ApiKeys
from text_generation_router.config import RouterConfig


def api_settings(limits: Limits, **values: object) -> Settings:
    """Settings with these values: fields of RouterConfig or of Settings."""
    own = {name: value for name, value in values.items() if name not in RouterConfig.model_fields}
    config = RouterConfig.of(**{name: values[name] for name in values.keys() - own.keys()})
    return Settings(limits, config, ApiKeys(config.api_key), "0.0.0", **own)  # type: ignore[arg-type]
