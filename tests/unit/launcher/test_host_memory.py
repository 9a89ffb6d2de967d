"""The memory of the host cache, and its parts."""

from __future__ import annotations

import mmap
import os

import pytest
from launch_plans import config, context, plan, shards_of
from pydantic import ValidationError

from text_generation_common.exit_codes import CannotServe
from text_generation_launcher.checks import check_engine
from text_generation_launcher.counts import PlanError
from text_generation_launcher.host_memory import HostMemory, check_host_memory, host_memory


def test_ranks_have_parts_of_the_host_cache_that_replicas_share() -> None:
    page, memory = mmap.PAGESIZE, HostMemory(9 * mmap.PAGESIZE + 5, 11, "m")
    on = context(4, host_cache=memory)
    planned = plan(on, num_replicas=2, num_shard=2, host_cache_size="1MiB")
    parts = [(each.host_cache_name, each.host_cache_start, each.host_cache_bytes) for each in shards_of(planned)]
    assert parts == [("m-0", 0, 4 * page), ("m-0", 4 * page, 4 * page)] * 2
    assert all(each.host_cache_fd == 11 for each in shards_of(planned))
    assert all(11 in shard.inherited_fds for shard in planned.shards)
    apart = plan(on, num_replicas=2, num_shard=2, parts="shards", shard_token="hush", shard_tcp_port=5000)
    parts = [(each.host_cache_name, each.host_cache_start, each.host_cache_bytes) for each in shards_of(apart)]
    assert parts == [(f"m-{number // 2}", number * 2 * page, 2 * page) for number in range(4)], "routers share nothing"
    assert not any(each.host_cache_bytes for each in shards_of(plan(4)))
    whole = plan(on, num_replicas=2, num_shard=1, host_cache_size="1MiB")
    assert [shard.name for shard in whole.shards] == ["shard-0", "shard-1"]


def test_the_memory_of_the_host_cache_ends_with_its_holder() -> None:
    with host_memory(1 << 20) as memory:
        assert os.fstat(memory.descriptor).st_size == 1 << 20
        with host_memory(1 << 20) as other:
            assert other.name != memory.name
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.descriptor)
    check_host_memory(1 << 20, 0.4)
    with pytest.raises(CannotServe, match=r"the machine has 0\.0 GiB for it"):
        check_host_memory(1 << 20, 1.0)  # shards on its CPUs have the rest
    with pytest.raises(CannotServe, match=r"the machine has"), host_memory(1 << 60):
        pass
    with pytest.raises(ValidationError, match="must be 1MiB or more"):
        config(host_cache_size="1023KiB")
    with pytest.raises(ValidationError, match="--no-prefix-caching is not supported"):
        config(host_cache_size="1GiB", prefix_caching=False)
    with pytest.raises(PlanError, match="for the torch engine"):
        check_engine(config(engine="echo", host_cache_size="1GiB"), {})
