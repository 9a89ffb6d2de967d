"""A tensor-parallel group: the processes that compute one replica's model together.

    join    rank 0 listens on the group's socket ─► the others connect ─► rank 0 broadcasts the address of its store ─► process
            group: NCCL between GPUs, gloo between CPUs
    step    the control channel carries the commands (channel.py); all-reduce and all-gather within a step are our kernels or
            torch's for small tensors on GPUs of one host, else those of the process group

A group on several hosts has a TCP address. Its store, gloo and NCCL use TCP ports of their own, or InfiniBand,
without authentication or encryption: the network between the hosts has to be private.

With one rank, the collectives do nothing, and torch.distributed is not imported.
"""

import logging
import os
import struct
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_proto.addresses import socket_path, split_host_port
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.parallel.channel import FollowerChannel, GroupBroken, LeaderChannel
from text_generation_shard.engines.torch.parallel.meeting import (
    accept_ranks,
    connect_to_leader,
    listen,
    network_interface,
)
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for type checkers

    from text_generation_shard.engines.torch.kernels.low_latency import LowLatencyCollectives
    from text_generation_shard.engines.torch.parallel.all_reduce import AllReduce

JOIN_TIMEOUT = 120.0
"""Seconds to wait for the other ranks: all start together, but importing torch from a cold disk takes long."""
JOIN_HOSTS_TIMEOUT = 3600.0
"""Seconds to wait for ranks on other hosts, which start at other times and may have to download the model."""
STORE_TIMEOUT = timedelta(seconds=120)
LOCALHOST = "127.0.0.1"
STORE = 1
"""The kind of the first message: the port of the store."""

_PORT = struct.Struct("<H")


class ParallelGroup:
    """The collectives and the control channel of a group. Created by `join_group`; with one rank, the collectives do nothing.

    All ranks call the same collectives in the same order, with tensors of the same shapes, on the current stream.
    """

    def __init__(
        self,
        tp: TensorParallelRank,
        channel: LeaderChannel | FollowerChannel | None = None,
        all_reduce: "AllReduce | None" = None,
        low_latency: "LowLatencyCollectives | None" = None,
    ) -> None:
        self.tp = tp
        self.channel = channel
        self._all_reduce = all_reduce
        self._low_latency = low_latency

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place."""
        if self._all_reduce is not None:
            self._all_reduce(tensor)

    def all_gather_last_dim(self, tensor: Tensor, out: Tensor) -> None:
        """Concatenate the ranks' `tensor`s [rows, n], contiguous, into `out` [rows, size · n], whose rows may be padded."""
        size = self.tp.world_size
        if size == 1:
            out.copy_(tensor)
            return
        if self._low_latency is not None and self._low_latency.supports(tensor):
            self._low_latency.all_gather(tensor, out)
            return
        import torch.distributed as dist

        # torch 2.13 renamed it, and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        rows, width = tensor.shape
        parts = tensor.new_empty(size, rows, width)
        gather(parts.view(size * rows, width), tensor)
        out.view(rows, size, width).copy_(parts.transpose(0, 1))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, contiguous, with rank 0's."""
        if self.tp.world_size > 1:
            from torch.distributed import broadcast

            broadcast(tensor, src=0)

    def agreed(self, value: float, device: torch.device) -> float:
        """Return the value of rank 0 on all ranks, which then decide the same."""
        shared = torch.tensor([value], device=device)
        self.broadcast(shared)
        return float(shared)

    @property
    def leader(self) -> LeaderChannel:
        assert isinstance(self.channel, LeaderChannel)
        return self.channel

    @property
    def follower(self) -> FollowerChannel:
        """The channel of a rank above 0."""
        assert isinstance(self.channel, FollowerChannel)
        return self.channel

    def close(self) -> None:
        """Leave the group. Graphs that contain its collectives must not be replayed any more."""
        if self.channel is None:
            return
        self.channel.close()
        self._all_reduce = self._low_latency = None
        # NCCL's communicators are not destroyed: that would wait for peers that may be lost.
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() != "nccl":
            dist.destroy_process_group()


def join_group(config: ShardConfig, device: torch.device) -> ParallelGroup:
    """Connect to the other ranks of this replica and set up the collectives on `device`. Raises EngineError."""
    tp = TensorParallelRank(config.rank, config.world_size)
    if tp.world_size == 1:
        return ParallelGroup(tp)
    channel, host = _meet(config, tp)
    try:
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        store = _share_store(channel, tp, host)
        _open_process_group(tp, device, store, "lo" if host == LOCALHOST else network_interface(host))
        from text_generation_shard.engines.torch.parallel.all_reduce import AllReduce
        from text_generation_shard.engines.torch.parallel.symmetric import create_low_latency_collectives

        exchanges = device.type == "cuda" and host == LOCALHOST
        low_latency = create_low_latency_collectives(device) if exchanges else None
        all_reduce = AllReduce(device, low_latency, one_shot=exchanges)
    except (GroupBroken, RuntimeError, ValueError) as error:  # torch.distributed raises RuntimeErrors
        channel.close()
        raise EngineError(f"the group could not be joined: {one_line(error)}") from error
    log.info(
        "joined",
        rank=tp.rank,
        world_size=tp.world_size,
        low_latency=low_latency is not None,
        one_shot=all_reduce.is_one_shot,
    )
    return ParallelGroup(tp, channel, all_reduce, low_latency)


def _meet(config: ShardConfig, tp: TensorParallelRank) -> tuple[LeaderChannel | FollowerChannel, str]:
    """Return the control channel, and the host of rank 0."""
    address, size = config.group_address, tp.world_size
    is_local = socket_path(address) is not None
    if not is_local and not config.shard_token:
        raise EngineError(f"a group that meets at {address} needs a token: set the same SHARD_TOKEN on all hosts")
    host = LOCALHOST if is_local else split_host_port(address)[0]
    timeout = JOIN_TIMEOUT if is_local else JOIN_HOSTS_TIMEOUT
    if tp.rank == 0:
        return accept_ranks(address, size, timeout, config), host
    return connect_to_leader(address, tp.rank, size, timeout, config), host


def _share_store(channel: LeaderChannel | FollowerChannel, tp: TensorParallelRank, host: str) -> "Store":
    """Open the store for the rendezvous of the process group; it listens on `host`, that of rank 0, only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported for type checkers

    if isinstance(channel, LeaderChannel):
        listener = listen((host, 0))
        port: int = listener.getsockname()[1]
        store: Store = TCPStore(
            host,
            port,
            tp.world_size,
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own socket would listen on all interfaces
        )
        channel.broadcast(STORE, _PORT.pack(port))
        return store
    kind, payload = channel.receive()
    assert kind == STORE
    (port,) = _PORT.unpack(payload)
    return TCPStore(host, port, tp.world_size, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def _open_process_group(tp: TensorParallelRank, device: torch.device, store: "Store", interface: str | None) -> None:
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME" if on_cuda else "GLOO_SOCKET_IFNAME", interface)
    if on_cuda:
        torch.cuda.set_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for training loops
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=tp.rank,
            world_size=tp.world_size,
            device_id=device if on_cuda else None,
        )
