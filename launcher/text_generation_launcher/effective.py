"""The settings of launcher, router and shards as a start would use them, for --print-config."""

from collections.abc import Mapping
from pathlib import Path

from text_generation_common.effective import DEFAULT, Effective
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.host_memory import HostMemory
from text_generation_launcher.launch import check_settings, devices_for_shards, socket_folder
from text_generation_launcher.model import local_folder
from text_generation_launcher.plan import SECRETS, ChildSpec, LaunchContext, make_plan

DERIVED = "launcher"
"""The source of a setting that the launcher derives from others, from the machine or from the model."""


async def effective_settings(config: LauncherConfig, environ: Mapping[str, str]) -> dict[str, Effective]:
    """Return the settings of each process by its name. Raises CannotServe."""
    devices = await devices_for_shards(config, environ)
    checked = check_settings(config.model_copy(update={"print_config": False}), environ, devices)
    with socket_folder(environ) as folder:
        context = LaunchContext(
            devices,
            # The folder of a download is known once it has ended.
            local_folder(config.model_id) or Path(f"<download of {config.model_id}>"),
            folder,
            lifeline_fd=-1,
            environ=environ,
            host_cache=HostMemory(checked.host_cache_bytes),
        )
        plan = make_plan(checked, context)
    derived = {name for name in type(config).model_fields if getattr(config, name) != getattr(checked, name)}
    sources = dict(config.sources) | dict.fromkeys(derived, DERIVED)
    del sources["print_config"]
    children = {child.name: _of_child(child, checked, sources) for child in (*plan.shards, *plan.router)}
    return {"launcher": Effective(checked, sources)} | children


def _of_child(child: ChildSpec, parent: LauncherConfig, sources: Mapping[str, str]) -> Effective:
    secrets = {name: getattr(parent, name) for name in SECRETS if hasattr(child.config, name)}
    config = child.config.model_copy(update=secrets)
    found = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in type(parent).model_fields and value == getattr(parent, name):
            found[name] = sources.get(name, DEFAULT)
        elif value != config.default(name):
            found[name] = DERIVED
    return Effective(config, found)
