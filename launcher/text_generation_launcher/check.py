"""`text-generation-launcher check MODEL`: what would be served, how, with how much memory, or why not.

The functions are those of a start, up to the point where weights are read: the launcher's plan, the shard's choice of engine and
code in a process of its own, the router's tokenizer, chat template and limits.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from text_generation_common.command_line import exit_with_usage_error, print_to_end
from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.lifeline import open_lifeline
from text_generation_common.options import options_by_topic
from text_generation_launcher.config import LauncherCheckConfig, LauncherConfig, read_config, size_in_bytes
from text_generation_launcher.counts import count_shards, on_devices
from text_generation_launcher.devices import Devices
from text_generation_launcher.host_memory import HostMemory, check_host_memory
from text_generation_launcher.launch import check_settings, devices_for_shards
from text_generation_launcher.model import resolve_model
from text_generation_launcher.plan import LaunchContext, LaunchPlan, child_argv, make_plan
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.assemble import find_call_format
from text_generation_router.chat.template_files import load_templates
from text_generation_router.config import RouterConfig
from text_generation_router.serve.http import resolve_limits
from text_generation_router.serve.shards import check_honoured
from text_generation_router.shards.join import ReplicaInfo
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_shard.config import ShardCheckConfig


def check_command(arguments: Sequence[str], environ: Mapping[str, str]) -> LauncherCheckConfig:
    """Return the settings of `check MODEL [flags]`; --json stands for --json-output."""
    argv = [argument if argument != "--json" else "--json-output" for argument in arguments]
    if {"-h", "--help"}.isdisjoint(argument.partition("=")[0] for argument in argv):
        argv = _with_model(argv)
    config = read_config(argv, environ, LauncherCheckConfig)
    for name in ("env", "print_config"):
        if getattr(config, name):
            exit_with_usage_error(LauncherCheckConfig, f"check does not accept --{name.replace('_', '-')}")
    return config


def _with_model(argv: Sequence[str]) -> list[str]:
    """Return the arguments with --model-id before the first word that is neither a flag nor the value of one."""
    options = [option for listed in options_by_topic(LauncherCheckConfig).values() for option in listed.values()]
    with_value = {flag for option in options if option.placeholder for flag in (option.flag, option.shortcut) if flag}
    words = iter(argv)
    read: list[str] = []
    for word in words:
        if word in with_value:
            read += [word, *islice(words, 1)]
        elif word.startswith("-"):
            read.append(word)
        else:
            return [*read, f"--model-id={word}", *words]
    return read


async def check(config: LauncherCheckConfig, environ: Mapping[str, str]) -> ExitCode:
    """Check the model, print the result and return the exit code: FAILED if the model would be refused."""
    try:
        found = await _check(config, environ)
    except CannotServe as error:
        found = {"model": config.model_id, "served": False, "reason": str(error)}
    print_to_end(f"{json.dumps(found)}\n" if config.json_output else "\n".join(_lines(found)) + "\n")
    return ExitCode.STOPPED if found["served"] else ExitCode.FAILED


async def _check(config: LauncherCheckConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    devices = await devices_for_shards(config, environ)
    if config.memory and config.device != "cpu":
        count = count_shards(config, replace(devices, count=max(devices.count, 1))) * config.num_replicas
        devices = replace(devices, count=count, name=f"GPU of {config.memory}")
    checked = check_settings(config, environ, devices)
    if not config.memory:  # else it is for another machine
        kept = 0.0 if on_devices(checked, devices) else checked.cpu_memory_fraction
        check_host_memory(checked.host_cache_bytes, kept)
    with tempfile.TemporaryDirectory(prefix="text-generation-check-") as temporary, open_lifeline() as lifeline_fd:
        folder = await resolve_model(config, environ, GracefulShutdown(), lifeline_fd, Path(temporary))
        host_cache = HostMemory(checked.host_cache_bytes)
        context = LaunchContext(devices, folder, Path(temporary), lifeline_fd, environ, host_cache=host_cache)
        plan = make_plan(checked, context)
        model = await _check_shard(config, plan) if plan.shards else None
        found = {
            "model": config.model_id,
            "served": True,
            "engine": checked.engine if plan.shards else None,
            "engine_reason": _engine_reason(config, checked, devices),
            "shards": count_shards(checked, devices),
            "replicas": config.num_replicas,
            "device": devices.name or ("GPU" if devices.count and config.device != "cpu" else "CPU"),
        }
        if plan.router:
            router = plan.router[0].config
            assert isinstance(router, RouterConfig)
            found |= _check_router(router, model)
    if model is not None:
        found = {name: value for name, value in model.items() if name != "description"} | found
    return found


async def _check_shard(config: LauncherCheckConfig, plan: LaunchPlan) -> dict[str, Any]:
    """Return what a shard finds out in a process of its own, which may import PyTorch. Raises CannotServe."""
    shard = plan.shards[0]
    settings = shard.config.model_dump() | {
        "json_output": False,
        "memory": size_in_bytes(config.memory),
        "max_batch_prefill_tokens": config.max_batch_prefill_tokens or 0,
    }
    process = await asyncio.create_subprocess_exec(
        *child_argv("text_generation_shard.check", ShardCheckConfig.of(**settings)),
        env=shard.env,
        pass_fds=shard.inherited_fds,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    try:
        found: dict[str, Any] = json.loads(output)
    except ValueError:
        raise CannotServe(f"the check of the engine ended with exit code {process.returncode}") from None
    if "refused" in found:
        raise CannotServe(found["refused"])
    return found


def _check_router(config: RouterConfig, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the router finds out. Raises CannotServe."""
    tokenizer, templates = Tokenizer.load(Path(config.model_path)), load_templates(config, Path(config.model_path))
    found: dict[str, Any] = {
        "chat_template": sorted(templates.sources),
        "tools_in_template": bool(templates.using_tools),
        "tool_call_parser": find_call_format(config, templates, tokenizer),
    }
    if model is not None and model.get("blocks") is not None:
        info, groups = pb.InfoResponse.FromString(bytes.fromhex(model["description"])), _cache_groups(model)
        host_cache = "host" if any(group.host_blocks for group in groups) else ""
        pool = pb.WarmUpResponse(num_blocks=model["blocks"], block_size=model["block_size"], host_cache=host_cache)
        replica = ReplicaInfo(info, pool)
        check_honoured(config, replica)
        limits = resolve_limits(config, replica)
        held = [group.blocks_held(limits.max_total_tokens, model["block_size"]) for group in groups]
        streams = (group.num_blocks // blocks for group, blocks in zip(groups, held, strict=True))
        found |= {
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "kv_cache_tokens": model["blocks"] * model["block_size"],
            "full_streams": min(model["max_slots"], *streams),
        }
    return found


def _engine_reason(config: LauncherConfig, checked: LauncherConfig, devices: Devices) -> str:
    if config.engine != "auto":
        return f"--engine {config.engine}"
    if checked.engine == "tensorrt-llm":
        return "it is installed, and there is a GPU"
    return "TensorRT-LLM is not installed" if devices.count and config.device != "cpu" else "no GPU is used"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["served"]:
        yield f"{found['model']} would be refused: {found['reason']}"
        return
    yield f"{found['model']} would be served."
    for name, text in _rows(found):
        yield f"  {name:14}{text}"


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if found["engine"] is not None:
        yield "engine", f"{found['engine']} ({found['engine_reason']})"
        yield "code", f"{found['code']} ({found['code_reason']})"
        kind = " ".join(filter(None, (found["model_type"], found["dtype"])))
        yield "model", f"{kind}, quantization: {found.get('quantization') or 'none'}"
        yield "devices", f"{found['replicas']} × {found['shards']} × {found['device']} (replicas × shards × device)"
    if "chat_template" in found:
        templates = ", ".join(found["chat_template"]) or "none: the model cannot chat"
        tools = "reads tools" if found["tools_in_template"] else "does not read tools: they are put into the prompt"
        yield "chat", f"template: {templates}" + (f"; {tools}" if found["chat_template"] else "")
        yield "tool calls", f"parser {found['tool_call_parser']}"
    if found.get("max_sequence_length"):
        served = f"; served: {found['max_total_tokens']:,}" if "max_total_tokens" in found else ""
        yield "context", f"{found['max_sequence_length']:,} tokens{served}"
    yield from _memory_rows(found, found.get("memory") or {})


def _cache_groups(found: Mapping[str, Any]) -> list[CacheGroup]:
    return [
        CacheGroup(group["blocks"], group["window"], is_state=group["state"], host_blocks=group["host_blocks"])
        for group in found.get("cache_groups", ())
    ]


def _memory_rows(found: Mapping[str, Any], memory: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
    if weights := memory.get("weights"):
        copies = f"; copies for a few rows: {_gib(size)}" if (size := memory.get("copies")) else ""
        yield "weights", f"{_gib(weights)} on each device{copies}"
    if usable := memory.get("usable"):
        yield "memory", f"{_gib(usable)} of {_gib(memory['device'] or 0)} may be used on each device"
        step = _gib(memory["largest_step"] or 0)
        yield "largest step", f"about {step}, with graphs and libraries; the start measures it"
    if token := memory.get("kv_cache_token"):
        yield "KV cache", f"{token:,} bytes a token on each device; about {_gib(memory['kv_cache_left'] or 0)} are left"
        groups = _cache_groups(found)
        if len(groups) > 1:
            yield "cache groups", _sizes(groups, [group.num_blocks for group in groups], found)
        if groups and groups[0].host_blocks:
            yield "host cache", _sizes(groups, [group.host_blocks for group in groups], found)
    elif memory:
        yield "KV cache", "its size is known once the model is loaded"
    if "kv_cache_tokens" in found:
        streams = f"{found['full_streams']:,} streams of {found['max_total_tokens']:,} tokens"
        most = f"at most {found['max_slots']:,} shorter ones, in each replica"
        yield "capacity", f"about {found['kv_cache_tokens']:,} tokens: {streams}, {most}"


def _sizes(groups: Sequence[CacheGroup], blocks: Sequence[int], found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{number:,} states of {_gib(found['memory']['state'] or 0)}"
        if group.is_state
        else f"{group.name} {number * found['block_size']:,} tokens"
        for group, number in zip(groups, blocks, strict=True)
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
