"""The wire can be used without the parts that processes share, and without their libraries."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
import text_generation_proto as wire
names = [found.name for found in pkgutil.walk_packages(wire.__path__, "text_generation_proto.")]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_wire_imports_no_settings_logs_or_tracing() -> None:
    count, *imported = subprocess.check_output([sys.executable, "-c", IMPORT_ALL], text=True, timeout=60).split()
    assert int(count) > 10
    assert "grpc" in imported
    unwanted = {"text_generation_common", "pydantic", "pydantic_settings", "structlog", "opentelemetry"}
    assert unwanted & set(imported) == set()
