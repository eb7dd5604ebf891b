"""Rendezvous over MPI: no address, no port, no environment variable.

MPI has the number of processes and the rank of each, so the ranks only lack their store. Rank 0
serves one, with a new job key, on a port that the system chooses; every rank sends rank 0 an MPI
message with its host (a *hello*), and receives the store's address and key. If all ranks are on one
host the store listens on loopback. Otherwise it listens on the interface that leads to the first of
the other hosts; if rank 0 cannot resolve that host's name, at the address that its own host has for
others. DURE_STORE_BIND sets another address.

Rank 0 reports the ranks that did not call to all others, so that their errors name them.
"""

from __future__ import annotations

import json
import platform
import time
from typing import Any

from dure import env
from dure.comm.backends.mpi.library import Library, load
from dure.errors import RendezvousTimeout, StoreError
from dure.store.address import interface_to, is_wildcard, own_address, resolve
from dure.store.identity import myself
from dure.store.init_method import InitMethod, TcpEndpoint
from dure.store.key import JobKey, mint
from dure.store.listener import listen
from dure.store.server import StoreServer

__all__ = ["find_mpi_place"]

_MESSAGE = 1024
_TAG = 29_500
_POLL_S = 1e-3
_REPLY_S = 2.0
"""How much longer a rank waits for rank 0 than rank 0 for the ranks."""


def find_mpi_place(timeout_s: float) -> InitMethod:
    """Get rank and size from MPI, and the store's address from rank 0.

    Raises:
        UsageError: mpi4py or MPI is missing.
        RendezvousTimeout: A rank did not call; `missing` names it.
        StoreError: Rank 0 cannot serve.

    Collective:
        All processes that MPI started together call.
    """
    library = load()
    rank, size = library.world.Get_rank(), library.world.Get_size()
    server: StoreServer | None = None
    if rank == 0:
        reply, server = _invite(library, timeout_s)
    else:
        reply = _say_hello(library, timeout_s)
    if "missing" in reply:
        raise RendezvousTimeout(
            "not all ranks called init_process_group",
            rank=rank,
            came=tuple(reply["came"]),
            missing=tuple(reply["missing"]),
            elapsed_s=timeout_s,
            seen=f"MPI also started ranks {reply['missing']}",
            fix="All processes of the MPI job must call it.",
        )
    if "failed" in reply:
        raise StoreError("rank 0 cannot serve the store", rank=rank, seen=reply["failed"])
    key = JobKey(bytes.fromhex(reply["key"]))
    endpoint = TcpEndpoint(host=reply["ip"], port=reply["port"], name="mpi", key=key, server=server)
    return InitMethod(endpoint=endpoint, rank=rank, world_size=size)


def _invite(library: Library, timeout_s: float) -> tuple[dict[str, Any], StoreServer | None]:
    """Wait for the hellos of all ranks, start the store, and send its address and key."""
    world, mpi = library.world, library.MPI
    size, server = world.Get_size(), None
    hellos = [bytearray(_MESSAGE) for _ in range(1, size)]
    requests = [world.Irecv(hello, r, _TAG) for r, hello in enumerate(hellos, start=1)]
    came = list(range(size))
    if _finish(library, requests, timeout_s):
        others = [bytes(hello).rstrip(b"\0").decode() for hello in hellos]
        try:
            answer, server = _serve(others)
        except StoreError as error:
            answer = {"failed": str(error)}
    else:
        came = [0, *(r for r, request in enumerate(requests, start=1) if request.Test())]
        for request in requests:
            if request != mpi.REQUEST_NULL:
                request.Cancel()
        answer = {"came": came, "missing": [r for r in range(size) if r not in came]}
    text = _padded(json.dumps(answer).encode())
    sent = [world.Isend(text, r, _TAG) for r in came if r]
    if not _finish(library, sent, _REPLY_S):
        library.kept.append((sent, text))
    return answer, server


def _say_hello(library: Library, timeout_s: float) -> dict[str, Any]:
    """Send a hello to rank 0, and return its reply."""
    world, answer = library.world, bytearray(_MESSAGE)
    hello = world.Isend(_padded(_own_host().encode()), 0, _TAG)
    reply = world.Irecv(answer, 0, _TAG)
    if not _finish(library, [reply, hello], timeout_s + _REPLY_S):
        reply.Cancel()
        return {"came": [world.Get_rank()], "missing": [0]}
    return json.loads(bytes(answer).rstrip(b"\0"))


def _own_host() -> str:
    """Return the host's name and its id, which differs between hosts of one name."""
    return f"{platform.node()} {myself().host_id}"


def _serve(others: list[str]) -> tuple[dict[str, Any], StoreServer]:
    """Start the store at an address that the hosts of the `others` can reach."""
    bind, key = env.text("DURE_STORE_BIND"), mint()
    abroad = [host.partition(" ")[0] for host in others if host != _own_host()]
    if bind and not is_wildcard(bind):
        reach = bind
    else:
        reach = (interface_to(abroad[0]) or own_address()) if abroad else "127.0.0.1"
    listener = listen(resolve(bind or reach, 0, "DURE_STORE_BIND" if bind else "rank 0's address"))
    server = StoreServer(listener, key)
    return {"ip": resolve(reach, 0).ip, "port": listener.port, "key": key.raw.hex()}, server


def _finish(library: Library, requests: list[Any], timeout_s: float) -> bool:
    """Wait for all `requests`; False if they take longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while requests:
        with library.lock:
            if library.MPI.Request.Testall(requests):
                break
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _padded(text: bytes) -> bytes:
    """Return `text` in the length of all messages here; a name that is too long is cut."""
    return text[:_MESSAGE].ljust(_MESSAGE, b"\0")
