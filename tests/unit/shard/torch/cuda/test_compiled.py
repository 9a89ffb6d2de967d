"""Kernels compiled for Hopper, as launches of a model compile them. This needs Triton's compiler and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[4] / "support"
ENOUGH_S = 500
GROUPED_PRODUCTS = """
import json
import compile_only, torch
from text_generation_shard.engines.torch.kernels.experts import experts
from text_generation_shard.engines.torch.kernels.operands import GatedActivation
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear

layer = [ExpertLinear(torch.empty(4, *shape, dtype=torch.bfloat16)) for shape in ((1536, 2048), (2048, 768))]
x, ids = torch.empty(8, 2048, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int32)
experts(x, ids, torch.empty(8, 2), *layer, GatedActivation("silu"))
print(json.dumps(compile_only.compiled["_product_kernel"]))
"""


def in_child(log: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the interpreter of Triton, which the tests of this folder use."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TEST_FULL")}
    paths = str(SUPPORT), *filter(None, [environment.get("PYTHONPATH")])
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "COMPILE_LOG": str(log)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=ENOUGH_S, check=False
    )


def test_grouped_products_load_weights_in_the_longest_pieces(tmp_path: Path) -> None:
    """With a stride of the inputs that is not a constant they load number by number, which takes ten times as long."""
    child = in_child(tmp_path / "log", "-c", GROUPED_PRODUCTS)
    assert child.returncode == 0, child.stderr
    kernels = json.loads(child.stdout)
    assert len(kernels) == 2
    for ptx in kernels:
        assert "wgmma.mma_async" in ptx
        assert "cp.async.cg.shared.global" in ptx
        assert "ld.global.b16" not in ptx


@pytest.mark.full
def test_all_kernels_compile(tmp_path: Path) -> None:
    """The results of the tests, which compare numbers that no kernel has written, do not matter here."""
    log = tmp_path / "log"
    options = "-p", "compile_only", "-p", "no:cacheprovider", "-q", f"--ignore={__file__}"
    child = in_child(log, "-m", "pytest", *options, str(Path(__file__).parent))
    assert " in " in child.stdout.splitlines()[-1], child.stdout + child.stderr
    assert not log.exists(), log.read_text()
