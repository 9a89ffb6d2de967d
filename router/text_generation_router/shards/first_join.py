"""The first joins of a router: it learns what the shards serve before it serves itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from text_generation_common.exit_codes import CannotServe
from text_generation_common.log import log
from text_generation_common.shard_access import ShardAccess
from text_generation_proto.client import ShardClient
from text_generation_proto.description import difference
from text_generation_proto.values import WarmUpLimits
from text_generation_router.shards.join import CannotJoin, ReplicaInfo, ShardEnded, ShardTaken, join, merge_capabilities
from text_generation_router.shards.member import JOIN_TIMEOUT_S, MAX_RETRY_S, RETRY_TAKEN_S

OTHERS_S = 1.0
"""Seconds for shards to join after one that a former router has driven. The others then join when they can."""


async def join_all(
    addresses: Sequence[str], limits: WarmUpLimits, access: ShardAccess, timeout_s: float
) -> Mapping[str, ReplicaInfo | None]:
    """Let shards join that are all to be there; one that does not answer, or is taken, is None.

    A router that takes over from another one does not wait for the rest longer than OTHERS_S. Raises CannotServe if one
    cannot join, or none does.
    """
    takes_over = False
    async with asyncio.TaskGroup() as tasks:
        joins = {each: tasks.create_task(_join_one(each, limits, access, timeout_s)) for each in addresses}
        joining = set(joins.values())
        while joining:
            limit_s = OTHERS_S if takes_over else None
            joined, joining = await asyncio.wait(joining, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not joined:
                break
            answers = (task.result() for task in joined)
            takes_over |= any(isinstance(each, ReplicaInfo) and each.pool.was_warm for each in answers)
        for task in joining:
            task.cancel()
    infos: dict[str, ReplicaInfo | None] = {}
    for address, task in joins.items():
        result = None if task.cancelled() else task.result()
        if isinstance(result, CannotJoin) and not takes_over:
            raise CannotServe(str(result))
        infos[address] = result if isinstance(result, ReplicaInfo) else None
        if infos[address] is None:
            log.warning("shard is left out for now", address=address, reason=str(result or "it does not answer"))
    if not any(infos.values()):
        raise CannotServe(f"no shard answers at {', '.join(addresses)}")
    like = merge_capabilities(infos.values())
    for number, info in enumerate(infos.values()):
        if info is not None and (different := difference(info.info, like.info)):
            raise CannotServe(f"the shards serve different things; one of number {number}: {different}")
    return infos


async def _join_one(
    address: str, limits: WarmUpLimits, access: ShardAccess, timeout_s: float
) -> ReplicaInfo | CannotJoin | None:
    try:
        async with ShardClient.connect(address, access) as client:
            return await _join_when_free(client, limits, address, timeout_s)
    except CannotJoin as error:
        return error
    except TimeoutError:
        log.error("no shard answers", address=address)
    except OSError as error:
        return CannotJoin(f"the certificates for {address} cannot be read: {error}")
    return None


async def _join_when_free(
    client: ShardClient,
    limits: WarmUpLimits,
    address: str,
    timeout_s: float,
    on_taken: Callable[[], None] = lambda: None,
) -> ReplicaInfo:
    """Wait for the shard, also while a router with other limits drives it or it restarts. Raises CannotJoin, TimeoutError."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return await join(client, limits, address, timeout_s)
        except ShardTaken as error:
            on_taken()
            log.info("shard is taken", address=address, reason=str(error))
            if time.monotonic() >= end:
                raise TimeoutError from error
        except ShardEnded as error:
            log.warning("shard ended while it joined", address=address, reason=str(error))
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(RETRY_TAKEN_S)


async def join_first(
    members: AsyncIterator[frozenset[str]], limits: WarmUpLimits, access: ShardAccess, on_taken: Callable[[], None]
) -> Mapping[str, ReplicaInfo | None]:
    """Return the first of `members` that joins, and its description. Waits until there is one.

    `on_taken` is called when one answers that another router drives it, with other limits.
    """
    first: asyncio.Future[tuple[str, ReplicaInfo]] = asyncio.get_running_loop().create_future()
    attempts: dict[str, asyncio.Task[None]] = {}

    async def attempt(address: str) -> None:
        reason = ""
        while True:
            try:
                async with ShardClient.connect(address, access) as client:
                    info = await _join_when_free(client, limits, address, JOIN_TIMEOUT_S, on_taken)
            except (CannotJoin, OSError) as error:
                if reason != str(error):
                    log.error("shard cannot join", address=address, reason=str(error))
                reason = str(error)
                await asyncio.sleep(MAX_RETRY_S)
            else:
                if not first.done():
                    first.set_result((address, info))
                return

    async with asyncio.TaskGroup() as tasks:

        async def follow() -> None:
            async for known in members:
                log.info("members", shards=len(known))
                for address in attempts.keys() - known:
                    attempts.pop(address).cancel()
                for address in known - attempts.keys():
                    attempts[address] = tasks.create_task(attempt(address))

        following = tasks.create_task(follow())
        address, info = await first
        following.cancel()
        for task in attempts.values():
            task.cancel()
    return {address: info}
