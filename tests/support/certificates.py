"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from text_generation_common.shard_access import ShardAccess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def write_certificates(
    folder: Path, token: str = "", name: str = "shards.text-generation", days: int = 2
) -> ShardAccess:
    """Write a new CA, and a key and certificate of a shard that it signs; return the settings that name them.

    `days`: negative for a certificate that has expired.
    """
    folder.mkdir(exist_ok=True)
    ca = ("req", "-x509", *NEW_KEY, "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem")
    request = ("req", "-new", *NEW_KEY, "-subj", "/CN=shard", "-keyout", "key.pem", "-out", "shard.csr",
               "-addext", f"subjectAltName=DNS:{name}", "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    leaf = ("x509", "-req", "-in", "shard.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-copy_extensions", "copy", "-days", str(days), "-out", "cert.pem")  # fmt: skip
    for command in (ca, request, leaf):
        subprocess.run(("openssl", *command), cwd=folder, check=True, capture_output=True)
    return ShardAccess.of(
        shard_token=token,
        shard_tls_cert=str(folder / "cert.pem"),
        shard_tls_key=str(folder / "key.pem"),
        shard_tls_ca=str(folder / "ca.pem"),
    )


def tls_arguments(access: ShardAccess) -> tuple[str, ...]:
    """Return the flags of these certificates."""
    return tuple(f"--shard-tls-{name}={getattr(access, f'shard_tls_{name}')}" for name in ("cert", "key", "ca"))
