"""The commands of `text-generation-launcher`: serve a model, check or convert one, print the environment or a completion script."""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping

from text_generation_common.command_line import exit_with_usage_error, print_to_end
from text_generation_common.effective import print_config
from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.log import log
from text_generation_common.logs import configure_logging
from text_generation_common.resource_limits import apply_limits, log_unexpected, low_limits
from text_generation_common.secrets import erase_secrets
from text_generation_common.stop_signals import run_to_end
from text_generation_launcher.config import COMMANDS, SAGEMAKER_PORT, SAGEMAKER_VARIABLES, LauncherConfig, read_config
from text_generation_launcher.init import fork_from_init


def run() -> None:
    """Run the command that the command line names."""
    if os.getpid() == 1:
        fork_from_init()
    argv = sys.argv[1:]
    if argv[:1] == ["completion"]:
        _print_completion(argv[1:])
        return
    if argv[:1] == ["convert"]:  # in another program: the launcher imports no modeling code
        os.execv(sys.executable, [sys.executable, "-P", "-m", "text_generation_shard.gguf", *argv[1:]])
    if argv[:1] == ["check"]:
        sys.exit(_check(argv[1:]))
    if argv[:1] == ["replay"] and (len(argv) < 2 or argv[1].startswith("-")):
        exit_with_usage_error(LauncherConfig, f"expected {COMMANDS['replay'][0]}")
    only_env, record = argv[:1] == ["env"], argv[1] if argv[:1] == ["replay"] else ""
    if argv[:1] == ["serve"]:
        config: LauncherConfig = read_config(
            [*argv[1:], "--port", SAGEMAKER_PORT], os.environ, further=SAGEMAKER_VARIABLES
        )
    else:
        config = read_config(["--env", *argv[1:]] if only_env else argv[2:] if record else argv, os.environ)
    try:
        code = _run_configured(config, only_env=only_env, record=record)
    except Exception as error:  # noqa: BLE001 - it is logged
        code = log_unexpected(error)
    sys.exit(code)


def _run_configured(config: LauncherConfig, *, only_env: bool, record: str) -> ExitCode:
    configure_logging(config, "launcher")
    faulthandler.enable(2)  # the watchdog of systemd ends a launcher that hangs with SIGABRT
    apply_limits()
    if limits := low_limits():
        log.warning("resource limits may be too low", **limits)
    environ = dict(os.environ)
    erase_secrets()
    if only_env or not config.model_id:
        from text_generation_launcher.environment import environment_report

        sys.stdout.write(f"{asyncio.run(environment_report(config, environ))}\n")
        return ExitCode.STOPPED
    if config.print_config:
        return _print_config(config, environ)
    if record:
        from text_generation_launcher.replay import replay

        return asyncio.run(replay(record, config, environ))
    from text_generation_launcher.launch import launch  # imported late: --help and usage errors do not need it

    return run_to_end(launch(config, environ))


def _print_config(config: LauncherConfig, environ: Mapping[str, str]) -> ExitCode:
    from text_generation_launcher.effective import effective_settings
    from text_generation_launcher.launch import log_start_error

    try:
        processes = asyncio.run(effective_settings(config, environ))
    except CannotServe as error:
        return log_start_error(error)
    print_config(processes, json_output=config.json_output)
    return ExitCode.STOPPED


def _check(arguments: list[str]) -> ExitCode:
    from text_generation_launcher.check import check, check_command

    config = check_command(arguments, os.environ)
    configure_logging(config, "check")
    environ = dict(os.environ)
    erase_secrets()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.default_int_handler)
    try:
        return asyncio.run(check(config, environ))
    except KeyboardInterrupt:  # temporary files are removed by now
        sys.stderr.write("text-generation-launcher check: interrupted\n")
        return ExitCode.FAILED


def _print_completion(arguments: list[str]) -> None:
    from text_generation_launcher.completion import completion_script

    try:
        if len(arguments) != 1:
            raise ValueError(f"expected {COMMANDS['completion'][0]}")
        print_to_end(completion_script(arguments[0]))
    except ValueError as error:
        exit_with_usage_error(LauncherConfig, str(error))
