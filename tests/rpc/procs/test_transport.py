"""Messages between real processes: through shared memory, through sockets, and when some end.

Agents that call each other over a transport of their own each: what `init_rpc` makes, and also with
options of the transport that it does not have.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure import env, native, rpc
from dure.errors import PeerLost, RpcError
from dure.rpc.agent import RpcAgent
from dure.rpc.current import current
from dure.rpc.joining import JoinOptions, connect
from dure.rpc.names import WorkerInfo
from dure.rpc.transport import HostTransport
from dure.testing import ProcessPool
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("engine")

both = pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])

_IDLE_S = 0.5

SIZES = [0, 1, 4096, 4097, 65_536, (1 << 20) + 3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Restore the level that `joined` sets, for tests after these in this process."""
    log = logging.getLogger("dure.rpc")
    before = log.level
    yield
    log.setLevel(before)


def joined(url: str, rank: int, size: int | None, name: str = "", **options: Any) -> RpcAgent:
    """Join at `url` as "w0", "w1", ... or `name`."""
    logging.getLogger("dure.rpc").setLevel(logging.CRITICAL)  # some end as they should
    name = name or f"w{rank}"
    place = JoinOptions(
        name=name,
        rank=rank,
        world_size=size,
        init_method=url,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    transport = connect(place, 4, **options)
    me = WorkerInfo(name, transport.peers.own_id)
    agent = RpcAgent(me, transport, PATIENCE_S, static=size is not None)
    agent.start()
    return agent


def transport_of(agent: RpcAgent) -> HostTransport:
    assert isinstance(agent.transport, HostTransport)
    return agent.transport


def end_of(agent: RpcAgent, peer: int) -> str | None:
    """Wait until a process is gone; return how it ended."""
    lost = until(lambda: agent.lost(peer), f"the end of {peer}")
    assert lost is not None
    return lost.exit


def closed(agent: RpcAgent) -> None:
    """Leave together: nobody is still called."""
    dure.barrier()
    agent.close()


def same(value: Any) -> Any:
    return value


def numbered(nbytes: int, number: int) -> torch.Tensor:
    """Return memory whose bytes are known by a number."""
    return (torch.arange(nbytes, dtype=torch.int64) * 31 + number).to(torch.uint8)


def are_equal(got: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
    return len(got) == len(sent) and all(map(torch.equal, got, sent))


# --- what arrives ---------------------------------------------------------------------------------


def call_back(to: int, value: Any) -> Any:
    return current().rpc_sync(to, same, (value,))


def exchange(agent: RpcAgent, rank: int) -> list[torch.Tensor]:
    """Send values of all sizes to the other and to this process, and return some that came."""
    for body in (b"", b"x" * 5000, b"y" * 70_000, b"z" * 3_000_000):
        assert agent.rpc_sync(1 - rank, same, (body,)) == body
    for number, nbytes in enumerate(SIZES):
        sent = [numbered(nbytes, number), numbered(7, 3), numbered(0, 0), numbered(nbytes, 4)]
        for to in (1 - rank, rank):
            got = agent.rpc_sync(to, same, (sent,))
            assert are_equal(got, sent)
            assert not {t.data_ptr() for t in got if len(t)} & {t.data_ptr() for t in sent}
    sent = [numbered(nbytes, number) for number, nbytes in enumerate(SIZES)]
    assert are_equal(agent.rpc_sync(1 - rank, same, (sent,)), sent)  # inline and not, in one call
    sent = [numbered(10_000, 9)]
    got = agent.rpc_sync(1 - rank, call_back, (rank, sent))  # a call within a call
    assert are_equal(got, sent)
    return got


def everything(rank: int, url: str, shared: bool) -> None:
    agent = joined(url, rank, 2, shared_memory=shared)
    got = exchange(agent, rank)
    used = native.heap_taken()
    closed(agent)
    del got
    assert (used > 0) == shared  # `got` is still the sender's memory, given to us
    until(
        lambda: not any("rpc" in thread.name for thread in threading.enumerate()), "threads to end"
    )


@both
def test_messages_and_memory_arrive_whole(process_pool, url: str, shared: bool) -> None:
    process_pool(2).run(everything, url, shared)


@contextmanager
def refused(where: Any, name: str, number: int) -> Iterator[None]:
    """Have the system refuse what a function asks for about other processes."""
    plain = getattr(where, name)

    def refuse(pid: int, *more: Any) -> Any:
        if pid == os.getpid():
            return plain(pid, *more)
        raise OSError(number, os.strerror(number))

    setattr(where, name, refuse)
    try:
        yield
    finally:
        setattr(where, name, plain)


def unmapped(rank: int, url: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    if rank == 0:
        with (
            refused(native, "heap_peer", errno.ENOMEM),
            pytest.raises(RpcError, match="its memory cannot be mapped"),
        ):
            rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
    else:
        joined(url, 1, 2).close(known=True)


def test_memory_that_cannot_be_mapped_is_an_error(process_pool, url: str) -> None:
    process_pool(2).run(unmapped, url)


_seen: set[tuple[int, int, int]] = set()
_lock = threading.Lock()


def note(call: tuple[int, int, int]) -> tuple[int, int, int]:
    with _lock:
        assert call not in _seen
        _seen.add(call)
    return call


_agents: list[RpcAgent] = []
"""Of a process of `Ranks`: what one call leaves to the next."""


def take_part(
    _: Slot, url: str, rank: int, size: int | None, shared: bool, host: str, name: str
) -> int:
    """Be there from now on; return the id."""
    if host:
        env.put("DURE_HOST_ID", host)
    _agents.append(joined(url, rank, size, name, shared_memory=shared))
    return _agents[0].me.id


def join_many(slot: Slot) -> int:
    take_part(slot, slot.url, slot.rank, slot.size, True, "", "")
    return threading.active_count()


def call_everybody(slot: Slot) -> int:
    for _ in range(2):
        futures = [_agents[0].rpc_async(to, same, (numbered(6000, to),)) for to in range(slot.size)]
        for to, future in enumerate(futures):
            assert torch.equal(future.wait(), numbered(6000, to))
    return threading.active_count()


def be_idle(_: Slot) -> float:
    """Return how long this process computes in half a second."""
    busy = time.process_time()
    time.sleep(_IDLE_S)
    return time.process_time() - busy


def leave(_: Slot, known: bool) -> None:
    _agents.pop().close(known)


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_many_small_workers_call_each_other_and_cost_nothing_when_idle(
    count: int, tmp_path: Path
) -> None:
    with Ranks(count, tmp_path, join_many) as ranks:
        assert max(ranks.values()) <= 7  # nothing for each that is there
        ranks.start(call_everybody)
        assert max(ranks.values()) <= 16  # nor for each that was called
        ranks.start(be_idle)
        assert max(ranks.values()) < _IDLE_S / 2  # a thread that looks all the time needs all of it
        ranks.start(leave, True)
        assert ranks.values() == [None] * count


# --- who ends -------------------------------------------------------------------------------------


@pytest.fixture
def start_victim(tmp_path: Path, url: str) -> Iterator[Callable[..., Ranks]]:
    """Return a function that starts another process, which takes part until it is killed."""
    with ExitStack() as started:

        def start(
            rank: int, size: int | None, shared: bool = True, host: str = "", name: str = "v"
        ) -> Ranks:
            what = (url, rank, size, shared, host, name)
            return started.enter_context(Ranks(1, tmp_path, take_part, *what))

        yield start


def murder(rank: int, url: str, shared: bool, pid: int) -> str | None:
    agent = joined(url, rank, 3, shared_memory=shared)
    answered = lost = number = 0
    peers = set[int | None]()
    sent = numbered(100_000, rank)
    victim = agent.info(2)
    while lost < 20:
        number += 1
        futures = [agent.rpc_async(victim, same, ((number, sent),)) for _ in range(2)]
        if rank == 0 and number == 50:
            os.kill(pid, signal.SIGKILL)
        for future in futures:
            try:
                assert future.wait()[0] == number
                answered += 1
            except PeerLost as error:
                peers.add(error.peer)
                lost += 1
    assert peers == {2}
    how = end_of(agent, 2)
    assert torch.equal(agent.rpc_sync(1 - rank, same, (sent,)), sent)
    closed(agent)
    assert rank != 0 or answered >= 50
    return how


@both
def test_a_process_that_is_killed_is_lost_to_all_and_no_call_hangs(
    process_pool, start_victim, url: str, shared: bool
) -> None:
    (pid,) = start_victim(2, 3, shared).pids
    how = "signal 9 (SIGKILL)" if shared else None
    assert process_pool(2).run(murder, url, shared, pid) == [how, how]


def without_pidfds(rank: int, url: str, number: int, pid: int) -> None:
    with refused(os, "pidfd_open", number):
        agent = joined(url, rank, 3)
    assert agent.rpc_sync(2, same, (rank,)) == rank
    dure.barrier()
    future = agent.rpc_async(2, hold)
    dure.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        future.wait()
    assert agent.rpc_sync(1 - rank, same, (rank,)) == rank
    closed(agent)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EMFILE], ids=["ENOSYS", "EMFILE"])
def test_deaths_are_noticed_without_pidfds(
    process_pool, start_victim, url: str, number: int
) -> None:
    (pid,) = start_victim(2, 3).pids
    process_pool(2).run(without_pidfds, url, number, pid)


def close_here() -> None:
    agent = current()
    for number in range(300):  # more than a ring holds: some through the other way
        agent.rpc_async(0, note, ((1, number, 1000),))
    agent.close()


def leaving(rank: int, url: str, shared: bool) -> None:
    _seen.clear()
    agent = joined(url, rank, 2, shared_memory=shared)
    dure.barrier()
    if rank == 0:
        future = agent.rpc_async(1, close_here)
        assert end_of(agent, 1) == "it left"
        for wait in (future.wait, lambda: agent.rpc_sync(1, same, (0,))):
            with pytest.raises(PeerLost):
                wait()
        until(lambda: len(_seen) == 300, "what it has sent before")
    dure.barrier()  # until here it lives on
    agent.close()


@both
def test_who_leaves_and_lives_on_is_lost(process_pool, url: str, shared: bool) -> None:
    process_pool(2).run(leaving, url, shared)


def far_away(rank: int, url: str) -> tuple[str | None, str]:
    agent = joined(url, rank, 3, unreachable_s=3.0)
    sent = numbered(1 << 20, rank)
    for to in (1 - rank, 2):
        assert torch.equal(agent.rpc_sync(to, same, (sent,)), sent)
    dure.barrier()
    other = transport_of(agent).peers.find(2)
    assert other is not None
    if rank == 0:
        os.kill(other.process.pid, signal.SIGKILL)
    how = end_of(agent, 2)
    assert agent.rpc_sync(1 - rank, same, (b"alive",)) == b"alive"
    closed(agent)
    return how, other.process.host


def test_a_process_of_another_host_that_cannot_be_reached_is_lost(start_victim, url: str) -> None:
    with ProcessPool(2, "gloo", hosts=["here", "there"]) as pool:
        start_victim(2, 3, host="elsewhere")
        assert pool.run(far_away, url) == [("it could not be reached", "elsewhere")] * 2


_held = threading.Event()


def hold() -> None:
    assert _held.wait(PATIENCE_S)
