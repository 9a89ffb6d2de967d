"""pytest plugin of `make test-trtllm-real`: which tests of the adapter do not apply to NVIDIA's own code, and why."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest
from standin import REAL

NOT_HERE = {
    "compiled": "compiled engines are C++",
    "scored_prompt": "log-probabilities of a prompt are computed on a GPU",
    "top_tokens_and_prompt_logprobs[1.3]": "log-probabilities of a prompt are computed on a GPU",
    "test_a_dead_worker_process_is_noticed": "workers are not started by MPI",
    "test_each_sequence_is_computed_with_its_own_adapter": "the engine does not get the name of an adapter",
    "test_spans": "the engine makes no spans",
    "from_responses_where_they_tell_it[1.2]": "results of 1.2 have no sums of drafts",
    "test_usage_is_not_reported": "usage is reported by a package that is not fetched",
    "test_what_a_request_leaves_out": "generation_config.json is read by code that is replaced",
}
"""Part of a test's name → the reason."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of NOT_HERE, and those of other releases."""
    for item in items:
        reason = next((reason for part, reason in NOT_HERE.items() if part in item.name), None)
        if any(f"[{other}" in item.name for other in {"1.2", "1.3"} - {REAL}):
            reason = "a test of another release"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kill the worker processes of engines that hang, as some tests let them; end without the library's handlers, which wait for them."""
    for process in multiprocessing.active_children():
        process.kill()
    session.config.add_cleanup(lambda: _exit(int(session.exitstatus)))


def _exit(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)
