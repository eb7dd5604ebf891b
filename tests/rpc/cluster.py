"""Several RPC workers in one process, with a simulated network that tests can hold.

    with Cluster(3) as cluster:
        with cluster.on(0):
            assert rpc.rpc_sync("worker1", max, (1, 2)) == 2

Messages are encoded, and tensors copied, as between processes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from random import Random
from typing import Any

import msgspec
import torch

from dure.errors import PeerLost
from dure.rpc.agent import RpcAgent
from dure.rpc.current import here
from dure.rpc.message import Completion, FutureCompletion, RpcMessage, Work
from dure.rpc.names import WorkerInfo

__all__ = ["Cluster", "LocalTransport", "Network"]

_decoder = msgspec.msgpack.Decoder(RpcMessage)

Event = tuple[bool, Callable[[], Work | None]]
"""Something that a process receives: whether it is a message, and a function that delivers it."""


class Network:
    """The simulated network.

    Args:
        random: Messages arrive in a random order, drawn from this; None: they arrive in order.
    """

    def __init__(self, random: Random | None = None) -> None:
        self.random = random
        self.lock = threading.RLock()
        self.transports: dict[int, LocalTransport] = {}
        self._held: dict[tuple[int, int], list[Event]] = {}

    def hold(self, sender: int, receiver: int) -> None:
        """Hold all messages in one direction until `release`."""
        with self.lock:
            self._held.setdefault((sender, receiver), [])

    def release(self, sender: int, receiver: int) -> None:
        """Deliver the held messages."""
        with self.lock:
            for event in self._held.pop((sender, receiver), []):
                self.transports[receiver].deliver(event)

    def kill(self, id: int, how: str = "signal 9 (SIGKILL)") -> None:
        """Stop a process, and notify all others of its death."""
        with self.lock:
            self.transports.pop(id).stop()
            for other, transport in self.transports.items():
                self.release(id, other)
                transport.deliver((False, partial(transport.receiver.died, id, how)))

    def send(self, to: int, sender: int, raw: bytes, memories: Sequence[torch.Tensor]) -> None:
        """Send a message; the memories must be copies."""
        with self.lock:
            if sender not in self.transports:
                return
            receiver = self.transports.get(to)
            if receiver is None:
                raise PeerLost("the peer has ended", peer=to)
            event = (True, partial(receiver.on_message, raw, memories))
            held = self._held.get((sender, to))
            if held is not None:
                held.append(event)
            else:
                receiver.deliver(event)


class _Ticket:
    def __init__(self) -> None:
        self.done = False


class LocalTransport:
    """One process's end of a `Network`."""

    def __init__(self, network: Network, id: int, slots: int = 16) -> None:
        self.network, self.id = network, id
        self._slots = threading.Semaphore(slots)
        self._inbox: deque[Event] = deque()
        self._bell = threading.Condition()
        self._order = threading.Lock()  # events are processed one by one
        self._here = threading.local()
        self._threads: list[threading.Thread] = []
        self._open = True
        network.transports[id] = self

    def start(self, receiver: RpcAgent) -> None:
        """Start to receive; no call is refused."""
        for id in self.network.transports:
            receiver.joined(id, f"worker{id}")
        self.receiver = receiver
        self._spawn(self._work)

    def look(self, to: str | int) -> None:
        """Do nothing: all workers are known from the start."""

    def send(
        self,
        to: int,
        message: RpcMessage,
        memories: Sequence[torch.Tensor],
        patient: bool = False,
    ) -> None:
        """Send a message."""
        copies = [memory.clone() for memory in memories]
        self.network.send(to, self.id, msgspec.msgpack.encode(message), copies)

    def ticket(self) -> _Ticket:
        """Return a new ticket."""
        return _Ticket()

    def complete(self, ticket: _Ticket) -> None:
        """Complete a ticket, and wake the threads that wait for it."""
        with self._bell:
            ticket.done = True
            self._bell.notify_all()

    def wait(self, ticket: _Ticket, seconds: float = inf, asked: None = None) -> bool:
        """Wait for a ticket, and process messages during the wait."""
        runs = getattr(self._here, "runs", False)
        if runs:
            self._slots.release()
        try:
            until = time.monotonic() + seconds
            while self._next(until, ticket):
                pass
        finally:
            if runs:
                self._slots.acquire()
        return ticket.done

    def submit(self, work: Work) -> None:
        """Run work on a thread, as a call is run."""
        self._spawn(partial(self._run, work))

    def close(self, known: bool = False) -> None:
        """Stop, without a notification of the other workers."""
        with self.network.lock:
            lives = self.network.transports.pop(self.id, None) is not None
        self.stop()
        for thread in self._threads:
            if lives and thread is not threading.current_thread():
                thread.join()

    # --- for the network ---------------------------------------------------------------------

    def deliver(self, event: Event) -> None:
        """Put an event into the inbox."""
        with self._bell:
            self._inbox.append(event)
            self._bell.notify_all()

    def on_message(self, raw: bytes, memories: Sequence[torch.Tensor]) -> Work | None:
        """Process a message."""
        return self.receiver.receive(_decoder.decode(raw), memories)

    def stop(self) -> None:
        """Stop processing events."""
        with self._bell:
            self._open = False
            self._bell.notify_all()

    # --- threads -----------------------------------------------------------------------------

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True, name=f"rpc-{self.id}")
        with self._bell:
            thread.start()
            self._threads = [thread, *(t for t in self._threads if t.is_alive())]

    def _work(self) -> None:
        while self._open:
            self._next(time.monotonic() + 60.0, _Ticket())

    def _next(self, until: float, ticket: _Ticket) -> bool:
        """Process an event; False if the ticket is done, the time is over, or this has stopped."""
        with self._bell:
            while self._open and not ticket.done and not self._inbox:
                left = until - time.monotonic()
                if left <= 0.0:
                    return False
                self._bell.wait(min(left, 60.0))
            if ticket.done or not self._open:
                return False
        with self._order:
            with self._bell:
                event = self._take()
            work = event[1]() if event is not None else None
        if type(work) is FutureCompletion and threading.current_thread() not in self._threads:
            self.receiver.caller.complete_soon()
        elif work is not None:
            self.submit(work)
        return True

    def _take(self) -> Event | None:
        if not self._inbox:
            return None
        at, random = 0, self.network.random
        if random is not None:
            messages = 0
            while messages < min(4, len(self._inbox)) and self._inbox[messages][0]:
                messages += 1
            at = random.randrange(max(1, messages))
        event = self._inbox[at]
        del self._inbox[at]
        return event

    def _run(self, call: Work) -> None:
        if isinstance(call, Completion):
            call()
            return
        with self._slots:
            if self._open:
                self._here.runs = True
                call()


class Cluster:
    """Agents of one network, named worker0, worker1, ...

    Args:
        size: Number of workers.
        random: See `Network`.
        slots: Number of calls that each worker runs at a time.
        how: Other arguments of `RpcAgent`.
    """

    def __init__(
        self, size: int, random: Random | None = None, slots: int = 16, **how: Any
    ) -> None:
        self.network = Network(random)
        infos = [WorkerInfo(f"worker{id}", id) for id in range(size)]
        transports: list[Any] = [LocalTransport(self.network, id, slots) for id in range(size)]
        self.agents = [
            RpcAgent(info, transport, **how)
            for info, transport in zip(infos, transports, strict=True)
        ]
        for agent in self.agents:
            agent.start()

    @contextmanager
    def on(self, id: int) -> Iterator[RpcAgent]:
        """Make this thread one of a worker's program inside the block."""
        before, here.agent = here.agent, self.agents[id]
        try:
            yield self.agents[id]
        finally:
            here.agent = before

    def everywhere(self, work: Callable[[int], Any]) -> list[Any]:
        """Run a function on all live workers, each in a thread, and return the results.

        Raises:
            Exception: The first error of one of them.
        """

        def run(id: int) -> Any:
            with self.on(id):
                return work(id)

        ids = sorted(self.network.transports)
        with ThreadPoolExecutor(len(ids)) as pool:
            return list(pool.map(run, ids))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for agent in self.agents:
                stack.callback(agent.close)
