"""Several workers of RPC in one process, with a network between them that tests can hold and cut.

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
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from random import Random
from types import TracebackType
from typing import Any

import msgspec
import torch

from dure.errors import PeerLost
from dure.rpc.agent import Agent
from dure.rpc.current import using
from dure.rpc.envelope import Completion, Envelope, Receiver, Waiter, Work
from dure.rpc.names import WorkerInfo

__all__ = ["Cluster", "LocalTransport", "Network"]

_decoder = msgspec.msgpack.Decoder(Envelope)

Event = tuple[bool, Callable[[], Work | None]]
"""Something that a process is told: whether it is a message, and how to tell it."""


class Network:
    """What is between the processes.

    Args:
        random: Messages overtake each other, as it says; None: they come in order.
    """

    def __init__(self, random: Random | None = None) -> None:
        self.random = random
        self.lock = threading.RLock()
        self.transports: dict[int, LocalTransport] = {}
        self._held: dict[tuple[int, int], list[Event]] = {}

    def hold(self, sender: int, receiver: int) -> None:
        """Let nothing through in one direction, until `release` or `cut`."""
        with self.lock:
            self._held.setdefault((sender, receiver), [])

    def release(self, sender: int, receiver: int) -> None:
        """Let through what was held."""
        with self.lock:
            for event in self._held.pop((sender, receiver), []):
                self.transports[receiver].tell(event)

    def cut(self, one: int, other: int) -> None:
        """Break the connection: what is held is lost; a new one stands at once."""
        with self.lock:
            for at, of in ((one, other), (other, one)):
                self._held.pop((at, of), None)
                transport = self.transports[at]
                transport.tell((False, partial(transport.receiver.broken, of)))

    def kill(self, id: int, how: str = "signal 9 (SIGKILL)") -> None:
        """Let a process die: it does nothing any more, and all others are told."""
        with self.lock:
            self.transports.pop(id).stop()
            for other, transport in self.transports.items():
                self.release(id, other)
                transport.tell((False, partial(transport.receiver.died, id, how)))

    def send(self, to: int, sender: int, raw: bytes, memories: Sequence[torch.Tensor]) -> None:
        """Carry a message; memories are its own."""
        with self.lock:
            if sender not in self.transports:
                return
            receiver = self.transports.get(to)
            if receiver is None:
                raise PeerLost("it is gone", peer=to)
            event = (True, partial(receiver.on_message, raw, memories))
            held = self._held.get((sender, to))
            if held is not None:
                held.append(event)
            else:
                receiver.tell(event)


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
        self._order = threading.Lock()  # events are dealt with one by one
        self._here = threading.local()
        self._threads: list[threading.Thread] = []
        self._open = True
        network.transports[id] = self

    def start(self, receiver: Receiver) -> None:
        """Begin to receive; no call is ever refused."""
        for id in self.network.transports:
            receiver.joined(id, f"worker{id}")
        self.receiver = receiver
        self._spawn(self._work)

    def look(self, to: str | int) -> None:
        """All are known from the start."""

    def send(self, to: int, envelope: Envelope, memories: Sequence[torch.Tensor]) -> None:
        """Send a message."""
        copies = [memory.clone() for memory in memories]
        self.network.send(to, self.id, msgspec.msgpack.encode(envelope), copies)

    def ticket(self) -> _Ticket:
        """Return a new ticket."""
        return _Ticket()

    def complete(self, ticket: Waiter) -> None:
        """Say that what it stands for is there."""
        assert isinstance(ticket, _Ticket)
        with self._bell:
            ticket.done = True
            self._bell.notify_all()

    def wait(self, ticket: Waiter, seconds: float = inf) -> bool:
        """Wait for a ticket, and deal with messages meanwhile."""
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
        """Have something run by a thread, as if it were a call."""
        self._spawn(partial(self._run, work))

    def close(self, known: bool = False) -> None:
        """End; the network tells nobody."""
        with self.network.lock:
            lives = self.network.transports.pop(self.id, None) is not None
        self.stop()
        for thread in self._threads:
            if lives and thread is not threading.current_thread():
                thread.join()

    # --- for the network ---------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Put an event into the inbox."""
        with self._bell:
            self._inbox.append(event)
            self._bell.notify_all()

    def on_message(self, raw: bytes, memories: Sequence[torch.Tensor]) -> Work | None:
        """Deal with a message."""
        return self.receiver.receive(_decoder.decode(raw), memories)

    def stop(self) -> None:
        """Deal with nothing any more."""
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

    def _next(self, until: float, ticket: _Ticket | Waiter) -> bool:
        """Deal with an event; False: the ticket is done, or the time over, or all is."""
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
        if work is not None:
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
        size: How many.
        random: See `Network`.
        slots: How many calls each runs at a time.
        how: Other arguments of `Agent`.
    """

    def __init__(
        self, size: int, random: Random | None = None, slots: int = 16, **how: Any
    ) -> None:
        self.network = Network(random)
        infos = [WorkerInfo(f"worker{id}", id) for id in range(size)]
        transports = [LocalTransport(self.network, id, slots) for id in range(size)]
        self.agents = [
            Agent(info, transport, **how) for info, transport in zip(infos, transports, strict=True)
        ]
        for agent in self.agents:
            agent.start()

    @contextmanager
    def on(self, id: int) -> Iterator[Agent]:
        """While within: this thread is one of that worker's program."""
        with using(self.agents[id]):
            yield self.agents[id]

    def everywhere(self, work: Callable[[int], Any]) -> list[Any]:
        """Run something on all that live, each in a thread; return what they return.

        Raises:
            Exception: The first error of one of them.
        """
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run(id: int) -> None:
            try:
                with self.on(id):
                    results[id] = work(id)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(id,), daemon=True) for id in self.network.transports
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[id] for id in sorted(results)]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for agent in self.agents:
                stack.callback(agent.close)
