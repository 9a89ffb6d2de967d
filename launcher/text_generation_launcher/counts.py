"""The numbers of partitions, processes and devices that the settings ask for. Pure: computed from settings and facts."""

from __future__ import annotations

from text_generation_common.exit_codes import CannotServe
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices
from text_generation_shard.config import device_number


class PlanError(CannotServe):
    """The settings require something that this machine or version cannot do."""


def count_partitions(config: LauncherConfig, devices: Devices) -> int:
    """Return the number of model partitions on this host; with accelerators, each takes one. Raises PlanError."""
    if config.parts == "router":
        return 0
    partitions = _on_one_node(config, count_shards(config, devices))
    total = partitions * config.num_replicas
    if (number := device_number(config.device)) is not None and partitions > 1:
        raise PlanError(f"`device` is {config.device}, and {partitions} shards take a device each")
    if config.num_replicas > 1 and on_devices(config, devices) and number is not None:
        raise PlanError(f"`device` is {config.device}, and {config.num_replicas} replicas take a device each")
    if number is not None and config.engine == "tensorrt-llm" and number >= devices.count:
        raise PlanError(f"`device` is {config.device}, and {devices.count} devices are visible")
    # Partitions of one model may share a CPU only if --device cpu asks for it: sharing one gains nothing.
    split = partitions > 1 and (config.device != "cpu" or config.engine == "tensorrt-llm")
    if total > devices.count and (split or (config.num_replicas > 1 and on_devices(config, devices))):
        raise PlanError(
            f"not enough cuda devices: {total} shards take one each (--num-replicas "
            f"{config.num_replicas}, --num-shard {partitions}), and {devices.count} are visible"
        )
    return total


def on_devices(config: LauncherConfig, devices: Devices) -> bool:
    """Return True if the shards run on accelerators, as far as the settings show."""
    return devices.count > 0 and config.device != "cpu" and config.engine != "echo"


def gpus_per_shard(config: LauncherConfig, devices: Devices) -> int:
    """Return the number of GPUs that one shard process uses. Raises PlanError."""
    return count_shards(config, devices) // count_processes(config, devices) if on_devices(config, devices) else 0


def count_shards(config: LauncherConfig, devices: Devices) -> int:
    """Return the number of partitions to split the model into (TGI: shards). Raises PlanError."""
    requested = config.num_shard
    if config.nodes > 1 and requested is None:
        requested = max(1, devices.count) * config.nodes
    if config.sharded:
        if requested is None and devices.count <= 1:
            raise PlanError(f"`sharded` is true but only found {devices.count} CUDA devices")
        if requested is not None and requested <= 1:
            raise PlanError("`sharded` is true but `num_shard` <= 1")
        requested = devices.count if requested is None else requested
    # Without either setting TGI uses all visible devices. A model that fits in one device serves more as replicas.
    num_shard = 1 if requested is None else requested
    if num_shard > 1 and config.engine == "echo":
        raise PlanError(
            f"{num_shard} shards were asked for (--num-shard, --sharded): the echo engine has no model to split"
        )
    return num_shard


def count_processes(config: LauncherConfig, devices: Devices) -> int:
    """Return the number of shard processes per replica on this host. Raises PlanError.

    One per partition, except for TensorRT-LLM: it spreads over devices itself, behind one shard.
    """
    return 1 if config.engine == "tensorrt-llm" else _on_one_node(config, count_shards(config, devices))


def _on_one_node(config: LauncherConfig, shards: int) -> int:
    if shards % config.hosts:
        raise PlanError(f"{shards} shards (--num-shard) cannot be divided among {config.hosts} nodes")
    return shards // config.hosts


def compute_type(partitions: int, devices: Devices) -> str:
    """Return the default x-compute-type header: number of partitions over all replicas and device, as `1-nvidia-h200`, `2-cpu`."""
    if devices.count == 0:
        return f"{partitions}-cpu"
    return f"{partitions}-{(devices.name or 'gpu').lower().replace(' ', '-')}"
