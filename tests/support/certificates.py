"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from text_generation_proto.access import ShardAccess


def write_certificates(folder: Path, token: str = "", name: str = "shards.text-generation") -> ShardAccess:
    """Write a new CA, and a key and certificate of a shard that it signs; return the settings that name them."""
    folder.mkdir(exist_ok=True)
    new = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    ca = (*new, "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem")
    leaf = (*new, "-subj", "/CN=shard", "-keyout", "key.pem", "-out", "cert.pem", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-addext", f"subjectAltName=DNS:{name}", "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    for command in (ca, leaf):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ShardAccess.of(
        shard_token=token,
        shard_tls_cert=str(folder / "cert.pem"),
        shard_tls_key=str(folder / "key.pem"),
        shard_tls_ca=str(folder / "ca.pem"),
    )


def tls_arguments(access: ShardAccess) -> tuple[str, ...]:
    """Return the flags of these certificates."""
    return tuple(f"--shard-tls-{name}={getattr(access, f'shard_tls_{name}')}" for name in ("cert", "key", "ca"))
