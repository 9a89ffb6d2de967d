"""Settings of a process: their types, defaults, and the environment as their source."""

from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from text_generation_common.heartbeat import HANG_TIMEOUT_S

OTLP_MISSING = (
    "traces need the extra `otlp`: pip install 'opentelemetry-sdk>=1.40' 'opentelemetry-exporter-otlp-proto-grpc>=1.40'"
)
_LEVELS = {"trace": "debug", "warn": "warning", "off": "error"}
"""Levels of TGI's filters that have another name here."""


MAX_BATCH_SIZE = 65_536
"""Sequences of a replica: what each of them takes at the start is taken for as many as the setting allows."""
TokenBudget = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""Tokens of a step, or of a KV cache: the wire and the tables of the engines have 32 bits for them."""


class Topic(Enum):
    """A title, in the order of the lists. The `topics` of a settings class name its settings."""

    ROUTER = "Router alone"
    SHARD = "Shard alone"
    MODEL = "Model"
    REPLICAS = "Replicas and shards"
    ACCESS = "Access to the shards"
    HTTP = "HTTP"
    REQUESTS = "Limits of a request"
    QUEUE = "Queue and overload"
    BATCHING = "Batching and KV cache"
    TENSORRT_LLM = "TensorRT-LLM"
    AUDITS = "Audits"
    TRACES = "Traces and metrics"
    LOGS = "Logs and debugging"
    ECHO = "Echo engine (tests)"


def _level(text: object) -> object:
    """Return the level that a filter of TGI's sets for all targets; info if it names only targets."""
    if not isinstance(text, str):
        return text
    plain = [part.strip() for part in text.split(",") if "=" not in part]
    level = plain[-1] if plain else "info"
    return _LEVELS.get(level.lower(), level)


def otlp_installed() -> bool:
    """Return True if the packages of the extra `otlp` are installed."""
    try:
        return None not in map(find_spec, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"))
    except ModuleNotFoundError:  # a package above them is missing
        return False


class ProcessConfig(BaseSettings):
    """Settings of every process. Precedence: command line, environment (the flag in upper snake case), default.

    An empty environment variable counts as unset.
    """

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        frozen=True,
        extra="forbid",
    )

    flag_only: ClassVar[frozenset[str]] = frozenset()
    """Settings of this class that are not read from the environment."""
    topics: ClassVar[Mapping[Topic, str]] = {Topic.LOGS: "json_output log_level"}
    """The names of the settings of this class, by topic."""
    usages: ClassVar[Sequence[str]] = ("[flags]",)
    """Forms of the command line, without the name of the program, for --help."""
    files: ClassVar[Mapping[str, str]] = {}
    """Settings that are read from files, with the settings that name the files."""

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    json_output: bool = False
    """Log JSON objects, one per line."""
    log_level: Annotated[str, BeforeValidator(_level), Field(pattern="^(?i:debug|info|warning|error)$")] = "info"
    """Least severe level that is logged: debug, info, warning or error. Of a filter as TGI has it, such as
    `warn,text_generation_router=debug`, the level without a target counts."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read values from arguments and environment; pydantic-settings itself puts the command line first."""
        return init_settings, Environment(settings_cls, cls.without_variable())

    @property
    def sources(self) -> Mapping[str, str]:
        """The source of each setting without its default: a flag, a variable of the environment, or a file."""
        return self._sources

    @classmethod
    def without_variable(cls) -> frozenset[str]:
        """Return the settings that only a flag can set."""
        return frozenset().union(*(vars(base).get("flag_only", ()) for base in cls.__mro__))

    @classmethod
    def of(cls, **values: object) -> Self:
        """Return settings with these values and defaults for the rest; the environment is not read."""
        return cls(**{name: cls.default(name) for name in cls.model_fields} | values)

    @classmethod
    def default(cls, name: str) -> Any:  # noqa: ANN401 - of the type of the setting
        return cls.model_fields[name].get_default(call_default_factory=True, validated_data={})


class SharedSettings(ProcessConfig):
    """The settings that launcher, router and shards share."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"print_config"})
    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.LOGS: "print_config",
        Topic.REPLICAS: "hang_timeout",
        Topic.TRACES: "otlp_endpoint otlp_service_name",
    }

    print_config: bool = False
    """Print the effective settings and the source of each, without secrets, and end. With --json-output as JSON. A flag only."""
    hang_timeout: Annotated[float, Field(ge=0)] = HANG_TIMEOUT_S
    """Seconds without progress after which a replica counts as hung: its sequences move to other replicas, and the launcher
    logs the stacks of its threads, kills and restarts it. A step has the time of a decode step more for each of its prompt
    tokens, at most 10 minutes. The launcher also ends a router that does not answer for that long. 0: never; less than 2
    is taken as 2."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that gets traces by OTLP over gRPC, such as http://localhost:4317. Default:
    OTEL_EXPORTER_OTLP_ENDPOINT; without both nothing is traced."""
    otlp_service_name: str = ""
    """Name of the service in traces. Default: OTEL_SERVICE_NAME, else text-generation-inference.router for the router and
    text-generation-inference.server for the shards, as in TGI."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        try:
            # A word alone is hardly a host: without a scheme the port is needed.
            has_port = bool(parts.port) or (parts.port is None and "://" in endpoint)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and has_port
        except ValueError:
            valid = False
        if endpoint and (not valid or "@" in parts.netloc):
            # A password here would be shown with the settings.
            raise ValueError("it must be the URL of a collector, http://HOST:PORT or https://HOST:PORT, without a user")
        return endpoint

    @model_validator(mode="after")
    def _check_packages(self) -> Self:
        if self.otlp_endpoint and not otlp_installed():
            raise ValueError(f"--otlp-endpoint (or OTLP_ENDPOINT): {OTLP_MISSING}")
        return self


class ChildConfig(ProcessConfig):
    """Settings of a process that the launcher starts."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"lifeline_fd"})
    topics: ClassVar[Mapping[Topic, str]] = {Topic.LOGS: "lifeline_fd"}

    lifeline_fd: int = -1
    """Inherited pipe whose end of file means that the parent died; set by the launcher."""


class Environment(EnvSettingsSource):
    """The environment, without the settings that only a flag can set."""

    def __init__(self, settings_cls: type[BaseSettings], flag_only: frozenset[str]) -> None:
        super().__init__(settings_cls)
        self._flag_only = flag_only

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in self._flag_only}
