"""Launch plans, and the settings that the planned children parse from their arguments."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TypeVar

from pydantic_settings import CliApp

from text_generation_common.settings import ProcessConfig
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices
from text_generation_launcher.plan import ChildSpec, LaunchContext, LaunchPlan, make_plan
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

C = TypeVar("C", bound=ProcessConfig)


def context(gpus: int = 0, **changes: object) -> LaunchContext:
    """Return the facts of a machine with 8 cores."""
    devices = Devices(gpus, "NVIDIA H200" if gpus else None)
    folders = (Path("/models/m"), Path("/tmp/tgi-1"))
    made = LaunchContext(devices, *folders, lifeline_fd=7, environ={"PATH": "/bin"}, cpus=8)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def config(**settings: object) -> LauncherConfig:
    return LauncherConfig.of(**{"model_id": "some/model", "engine": "torch", **settings})


def plan(on: LaunchContext | int = 0, **settings: object) -> LaunchPlan:
    """Return the plan for a machine, or for one with this number of GPUs."""
    return make_plan(config(**settings), context(on) if isinstance(on, int) else on)


def parsed(child: type[C], spec: ChildSpec, module: str) -> C:
    assert spec.argv[:4] == (sys.executable, "-P", "-m", module)
    return CliApp.run(child, cli_args=list(spec.argv[4:]))


def shards_of(plan: LaunchPlan) -> list[ShardConfig]:
    return [parsed(ShardConfig, shard, "text_generation_shard") for shard in plan.shards]


def router_of(plan: LaunchPlan) -> RouterConfig:
    (router,) = plan.router
    return parsed(RouterConfig, router, "text_generation_router")
