"""The settings of the HTTP API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.lora import MODEL_NAMES
from text_generation_router.api.http.keys import ApiKeys
from text_generation_router.config import RouterConfig
from text_generation_router.web.body_reader import BODY_S

MODEL_ALIAS = "tgi"
"""The name that TGI's clients give to any model."""
ANY_NAME = "*"
"""As one of `--served-model-name`: requests may name any model."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request."""

    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_top_logprobs: int = 20
    """The limit of `top_n_tokens` for OpenAI's names of it."""
    vocab_size: int = 1 << 20
    """Token ids that clients name are below this."""
    max_images: int = 0
    """The limit of the engine; 0: the model takes none."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Parameters that the engine does not support: name on the wire → reason."""
    always_logprobs: bool = False
    """Every request gets the log-probabilities of its tokens, if the engine knows them."""

    drafts: bool = False
    """The engine makes drafts, for which a prediction is a source."""
    marks_turns: bool = False
    """Requests tell where the turns of a chat end: the model has states, of which checkpoints are left there."""

    def __post_init__(self) -> None:
        assert 0 < self.max_input_tokens < self.max_total_tokens, "the longest prompt must leave room for a new token"


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings, and the values that the API derives from them once."""

    limits: Limits
    config: RouterConfig
    api_keys: ApiKeys
    """The keys of `config`."""
    version: str
    """Version of the server."""
    keep_alive_s: float = 15.0
    """Seconds of silence on a stream after which a comment is sent."""
    body_s: float = BODY_S
    """Seconds by which a request body may be late."""
    created: int = 0
    """Time of the model's files, in seconds since 1970."""

    @property
    def separate_tenants(self) -> bool:
        """True if tenants do not share cached prompts: by default if several keys distinguish them."""
        if self.config.prefix_cache_per_tenant is not None:
            return self.config.prefix_cache_per_tenant
        return self.api_keys.several and "cache_salt" not in self.limits.unsupported

    @property
    def model_id(self) -> str:
        """Name of the model in responses."""
        return self.config.model_id or self.config.model_path

    @property
    def takes_any_name(self) -> bool:
        """True if a request may name any model, and this one answers."""
        return ANY_NAME in self.config.served_model_name

    def serves(self, name: str | None) -> bool:
        """Return True if a request that names this model is for it.

        None, "", placeholders, single letters, as load generators send them, and the URL of the server, as
        @huggingface/inference sends it, name no model. The last part of the model's name may stand for it.
        """
        if not name or len(name) == 1 or name.startswith(("http://", "https://")):
            return True
        return self.is_model(name) or self.takes_any_name

    def is_model(self, name: str) -> bool:
        """Return True for a name of the model, which no adapter may have."""
        config = self.config
        return name in {self.model_id, self._short_name, config.model_path, *config.served_model_name, *MODEL_NAMES}

    @property
    def model_names(self) -> tuple[str, ...]:
        """The operator's names of the model, then its own; before one that is a path, the last part of it.

        Clients take the first one of a list.
        """
        names = [name for name in self.config.served_model_name if name != ANY_NAME]
        folder = Path(self.config.model_path).absolute()
        if self.model_id.startswith(("/", "~")) or Path(self.model_id).absolute() == folder:
            names.append(self._short_name)
        return (*names, self.model_id)

    @property
    def _short_name(self) -> str:
        return self.model_id.rstrip("/").rpartition("/")[2]

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` in OpenAI's dialect: version and build."""
        return f"{self.version}-{self.config.docker_label or 'native'}"
