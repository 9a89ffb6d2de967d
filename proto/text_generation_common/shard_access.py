"""Settings for access to shards, which launcher, router and shards share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from text_generation_common.settings import ProcessConfig, Topic

MAX_TOKEN_BYTES = 4096
"""Bytes of the file with the token; gRPC refuses calls with more than 8 kB of metadata."""


class ShardAccess(ProcessConfig):
    """The settings for access to shards. `ShardAccess()` reads them from the environment."""

    files: ClassVar[Mapping[str, str]] = {"shard_token": "shard_token_file"}
    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.ACCESS: "shard_token shard_token_file shard_tls_cert shard_tls_key shard_tls_ca shard_tls_name"
    }

    shard_token: Annotated[str, Field(pattern="^[!-~]*$", repr=False)] = ""
    """Token that every gRPC call to a shard must carry. The launcher makes a random one by default. A shard started alone
    without a token accepts every call. Use SHARD_TOKEN in the environment: command lines are visible to all users."""
    shard_token_file: str = ""
    """File with the token, such as a credential of systemd or a Secret of Kubernetes. It replaces shard_token. A
    pipe is read to its end: `<(command)` of a shell is possible."""
    shard_tls_cert: str = ""
    """PEM file with the certificate chain of both sides of connections to shards over TCP (mutual TLS). Files that change
    are read again."""
    shard_tls_key: str = ""
    """PEM file with the private key of shard_tls_cert."""
    shard_tls_ca: str = ""
    """PEM file with the certificates that sign shard_tls_cert."""
    shard_tls_name: str = "shards.text-generation"
    """Name that the certificate of a shard must have, at every address. Empty: the host of the address."""

    @model_validator(mode="before")
    @classmethod
    def _read_token(cls, settings: dict[str, object]) -> dict[str, object]:
        """Read the token from its file. Children get the token, not the file: its content may have changed meanwhile."""
        if not (file := settings.get("shard_token_file")):
            return settings
        named = f"--shard-token-file (or SHARD_TOKEN_FILE): {file}"
        try:
            with Path(str(file)).open("rb") as opened:
                content = opened.read(MAX_TOKEN_BYTES + 1)
            token = content.decode("ascii").strip()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it has characters that are not ASCII"
            raise ValueError(f"{named} cannot be read: {reason}") from None
        if len(content) > MAX_TOKEN_BYTES:
            raise ValueError(f"{named} is larger than {MAX_TOKEN_BYTES:,} bytes")
        if not token:
            raise ValueError(f"{named} is empty")
        return settings | {"shard_token": token, "shard_token_file": ""}

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        files = (self.shard_tls_cert, self.shard_tls_key, self.shard_tls_ca)
        if any(files) and not all(files):
            raise ValueError("--shard-tls-cert, --shard-tls-key and --shard-tls-ca belong together")
        return self

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with the token."""
        return {"SHARD_TOKEN": self.shard_token} if self.shard_token else {}
