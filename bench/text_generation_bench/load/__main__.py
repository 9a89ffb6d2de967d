"""The `text-generation-benchmark` command: parse flags, run the load or compare results, write files."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from text_generation_bench.load.client import tls_context
from text_generation_bench.load.compare import comparison, read_results
from text_generation_bench.load.report import report_page
from text_generation_bench.load.run import run
from text_generation_bench.load.settings import LoadSettings, fail, parse_settings
from text_generation_bench.load.views import view_for
from text_generation_common.exit_codes import ExitCode

INTERRUPTED = 130


def main() -> None:
    """Run the command; the exit code is 1 if all requests of a level failed."""
    settings = parse_settings()
    if settings.compare:
        compare(settings)
        return
    check_files(settings)
    try:
        result = run(settings, view_for)
    except KeyboardInterrupt:  # before the first level
        sys.exit(INTERRUPTED)
    if settings.output is not None:
        write(settings.output, orjson.dumps(result, option=orjson.OPT_INDENT_2 if not result["levels"] else 0).decode())
    if settings.records is not None:
        rows = ({"level": level["level"]} | row for level in result["levels"] for row in level["per_request"])
        write(settings.records, "".join(f"{orjson.dumps(row).decode()}\n" for row in rows))
    if settings.report is not None:
        write(settings.report, report_page([("", result)]))
    search = result.get("search")
    if search and search["rate"]:
        print(f"{search['share']:.0%} of the requests hold the targets up to {search['rate']:.4g} requests/s")
    elif search:
        print("no rate that was tried holds the targets")
    if result["interrupted"]:
        sys.exit(INTERRUPTED)
    failed = [level["requests"] == level["errors"] for level in result["levels"]]
    if (all if search else any)(failed):
        sys.exit(int(ExitCode.FAILED))


def compare(settings: LoadSettings) -> None:
    """Print the comparison of result files, and write it as a page."""
    results = read_results(settings.compare)
    try:
        text, page = comparison(results), report_page(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fail(f"--compare: a file is not a whole result file: {type(error).__name__}: {error}")
    print(text)
    if settings.report is not None:
        write(settings.report, page)


def check_files(settings: LoadSettings) -> None:
    """Find errors of files before processes start: one line and an exit."""
    from text_generation_bench.load.workload import Share, Workload

    Workload(settings, Share(0, 1))
    try:
        tls_context(settings)
    except OSError as error:
        fail(f"--tls-ca, --tls-cert or --tls-key: {error.strerror or error}")


def write(path: Path, text: str) -> None:
    """Write a file and name it; one line and an exit if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
