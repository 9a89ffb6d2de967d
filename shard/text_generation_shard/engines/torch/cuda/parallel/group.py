"""A tensor-parallel group: the processes that compute one replica's model together, and what they tell each other.

    join    rank 0 listens on the group's socket ─► the others connect ─► rank 0 says where its store listens ─► the
            process group: NCCL between GPUs, gloo between CPUs
    step    the control channel says which (channel.py); sums and gathers inside it are kernels of ours
            or torch's between GPUs if they are small, else the process group's

A model on one device joins nothing: its collectives do nothing, and torch.distributed is not touched.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from text_generation_proto.sockets import socket_path
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.parallel.channel import (
    Follower,
    GroupBroken,
    Leader,
    gather_group,
    meet_leader,
)
from text_generation_shard.engines.torch.cuda.split import Split

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from text_generation_shard.engines.torch.cuda.kernels.exchange import Exchange
    from text_generation_shard.engines.torch.cuda.parallel.all_reduce import AllReduce

MEETING_TIMEOUT = 120.0
"""Seconds that the others have to come: they start together, but importing torch from a cold disk takes its time."""
STORE_TIMEOUT = timedelta(seconds=120)
LOCALHOST = "127.0.0.1"
STORE = 1
"""The kind of the message with the store's port, the first of all."""

_PORT = struct.Struct("<H")

log = structlog.get_logger()


class Group:
    """The collectives of a model, and the control channel. Made by `join`; alone, the collectives do nothing.

    All ranks call the same ones in the same order, on tensors of the same shapes, on the current stream.
    """

    def __init__(
        self,
        place: Split,
        channel: Leader | Follower | None = None,
        all_reduce: AllReduce | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.place = place
        self.channel = channel
        self._all_reduce = all_reduce
        self._exchange = exchange

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place."""
        if self._all_reduce is not None:
            self._all_reduce(tensor)

    def all_gather_last_dim(self, tensor: Tensor, out: Tensor) -> None:
        """Put the ranks' `tensor`s [rows, n], contiguous, side by side into `out` [rows, size · n]; rows may be padded."""
        size = self.place.size
        if size == 1:
            out.copy_(tensor)
            return
        if self._exchange is not None and self._exchange.takes(tensor):
            self._exchange.gather(tensor, out)
            return
        import torch.distributed as dist

        # torch 2.13 has a new name for it, and warns of the old one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        rows, width = tensor.shape
        parts = tensor.new_empty(size, rows, width)
        gather(parts.view(size * rows, width), tensor)
        out.view(rows, size, width).copy_(parts.transpose(0, 1))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, contiguous, with rank 0's."""
        if self.place.size > 1:
            from torch.distributed import broadcast

            broadcast(tensor, src=0)

    @property
    def leader(self) -> Leader:
        """The channel of rank 0."""
        assert isinstance(self.channel, Leader)
        return self.channel

    @property
    def follower(self) -> Follower:
        """The channel of another rank."""
        assert isinstance(self.channel, Follower)
        return self.channel

    def close(self) -> None:
        """Leave the group. What was captured with its collectives must not be replayed any more."""
        if self.channel is None:
            return
        self.channel.close()
        self._all_reduce = self._exchange = None
        # NCCL's communicators end with the process: their own end would wait for peers that may be gone.
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() != "nccl":
            dist.destroy_process_group()


def join(config: ShardConfig, device: torch.device, timeout: float = MEETING_TIMEOUT) -> Group:
    """Meet the other shards of this replica, and set up the collectives on `device`. Waits for all; a group of one is there.

    Raises EngineError, in one line, if they do not come or cannot talk to each other.
    """
    place = Split(config.rank, config.world_size)
    if place.size == 1:
        return Group(place)
    path = socket_path(config.group_address)
    if path is None:
        raise EngineError("group_address must be unix:///path")
    channel: Leader | Follower
    if place.rank == 0:
        channel = gather_group(path, place.size, timeout)
    else:
        channel = meet_leader(path, place.rank, place.size, timeout)
    try:
        _quieten()
        store = _share_store(channel, place)
        _open_process_group(place, device, store)
        from text_generation_shard.engines.torch.cuda.parallel.all_reduce import AllReduce
        from text_generation_shard.engines.torch.cuda.parallel.symmetric import open_exchange

        exchange = open_exchange(device) if device.type == "cuda" else None
        all_reduce = AllReduce(device, exchange)
    except (GroupBroken, RuntimeError, ValueError) as error:  # torch.distributed's own errors are RuntimeErrors
        channel.close()
        raise EngineError(f"the group could not be joined: {' '.join(str(error).split())}") from error
    log.info(
        "joined",
        rank=place.rank,
        world_size=place.size,
        exchange=exchange is not None,
        one_shot=all_reduce.is_one_shot,
    )
    return Group(place, channel, all_reduce, exchange)


def _share_store(channel: Leader | Follower, place: Split) -> Store:
    """The store in which the ranks find each other's addresses; it listens on this machine's own interface alone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public, but torch does not say so

    if isinstance(channel, Leader):
        listener = socket.create_server((LOCALHOST, 0))
        port: int = listener.getsockname()[1]
        store: Store = TCPStore(
            LOCALHOST,
            port,
            place.size,
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own would listen on all interfaces
        )
        channel.broadcast(STORE, _PORT.pack(port))
        return store
    kind, payload = channel.receive()
    assert kind == STORE
    (port,) = _PORT.unpack(payload)
    store = TCPStore(LOCALHOST, port, place.size, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)
    return store


def _open_process_group(place: Split, device: torch.device, store: Store) -> None:
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    # All ranks are on this machine: what goes by TCP at all goes by its own interface.
    os.environ.setdefault("NCCL_SOCKET_IFNAME" if on_cuda else "GLOO_SOCKET_IFNAME", "lo")
    if on_cuda:
        torch.cuda.set_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for those who write training loops
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            device_id=device if on_cuda else None,
        )


def _quieten() -> None:
    """Errors alone: the log is no place for what torch.distributed says by the way."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
