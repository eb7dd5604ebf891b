"""The agent: one process's part in remote calls.

It knows the other processes, receives messages, and sends them. Its parts are the calls that it
makes (`caller`), those that it runs (`callee`), the contents of messages (`payloads`), the values
of references (`values`), and distributed autograd (`autograd.backward`).

Threads:
    One lock guards all tables. No message is sent, and no code of the program runs, while it is
    held: such actions are put on a list, and run when it is released (`RpcAgent.step`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost
from dure.rpc.allow import Allowed
from dure.rpc.autograd.backward import TOPIC as PASSES
from dure.rpc.autograd.backward import Contexts
from dure.rpc.callee import Callee
from dure.rpc.caller import Caller
from dure.rpc.codec import Packed
from dure.rpc.directory import Directory, Peer
from dure.rpc.message import (
    CALL,
    FETCH,
    GRADIENTS,
    MAKE,
    REPORT,
    Completion,
    GradientTag,
    MessageType,
    Numbered,
    PassTag,
    Received,
    RpcMessage,
    Work,
)
from dure.rpc.names import WorkerInfo
from dure.rpc.payloads import NOTHING, Function, Payloads
from dure.rpc.recording import Recorder
from dure.rpc.references import RefId
from dure.rpc.termination import Gatherings
from dure.rpc.timers import Timers
from dure.rpc.values import TOPIC as REFERENCES
from dure.rpc.values import Value, Values

if TYPE_CHECKING:
    from dure.native import Outbox
    from dure.rpc.transport import HostTransport

__all__ = ["RpcAgent"]

_CALLS = frozenset({CALL, MAKE, FETCH})
_WITHOUT_FINALIZERS = frozenset({None, type(None), bool, int, float, str, bytes, torch.Tensor})
"""Types of values whose finalizers run no code of the program."""


class _LockedStep:
    """See `RpcAgent.step`; not a generator, which would double the cost of a small step."""

    __slots__ = ("_agent", "_except_for")

    def __init__(self, agent: RpcAgent, except_for: int) -> None:
        self._agent, self._except_for = agent, except_for

    def __enter__(self) -> None:
        self._agent.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        agent = self._agent
        if kind is not None or not agent.todo:
            agent.lock.release()
        else:
            todo = agent.todo[:]
            agent.todo.clear()
            agent.lock.release()
            for action in todo:
                action()
        due = agent.directory.due
        if due and kind is None and not (len(due) == 1 and self._except_for in due):
            agent.flush(self._except_for)


class RpcAgent:
    """The agent of a process.

    Args:
        me: This process.
        transport: Carries messages; not started yet.
        timeout: Of calls that specify none, in seconds; 0 for none.
        allow: The functions that others may call; if None, all.
        static: Whether no process joins later.

    Attributes:
        caller: The calls of this process.
        callee: The calls of others that run here.
        payloads: Packs and unpacks values.
        values: The values of references.
        directory: The processes.
        gradients: The contexts of distributed autograd.
        device_maps: For each worker, by name, the worker's device for each device of this process.
        lock: Guards all tables.
        todo: Actions that run when the lock is released.
    """

    def __init__(
        self,
        me: WorkerInfo,
        transport: HostTransport,
        timeout: float = 60.0,
        allow: Allowed | None = None,
        static: bool = True,
    ) -> None:
        self.me, self.transport, self.timeout, self.static = me, transport, timeout, static
        self.allow = allow
        self.device_maps: Mapping[str, Mapping[torch.device, torch.device]] = {}
        self.timers = Timers()
        self.lock = threading.RLock()  # reentrant, so that calls of finalizers can be refused
        self.todo: list[Callable[[], None]] = []
        self.directory = Directory(self.timers, self._send_waiting, transport.look)
        self.find, self.info = self.directory.find, self.directory.info
        self.lost = self.directory.lost
        self.recorder = Recorder(me)
        self.caller = Caller(self)
        self.calls = self.caller.calls
        self.rpc_sync, self.rpc_async = self.caller.rpc_sync, self.caller.rpc_async
        self.remote = self.caller.remote
        self.values = Values(self)
        self.payloads = Payloads(self)
        self.callee = Callee(self)
        self.gatherings = Gatherings(self)
        self.gradients = Contexts(me, self)

    def start(self) -> None:
        """Start to receive."""
        self.recorder.start()
        self.transport.start(self)

    # --- membership --------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerInfo]:
        """The processes that have joined and are not gone, this one included, by id."""
        with self.lock:
            return self.directory.workers()

    @property
    def closed(self) -> bool:
        """Whether RPC has ended in this process."""
        return self.calls.closed

    def joined(self, id: int, name: str) -> None:
        """Add a process; the transport calls this."""
        with self.step():
            if self.lost(id) is None:
                self.directory.add(WorkerInfo(name, id))
                self.recorder.joined(id)

    def died(self, id: int, how: str) -> None:
        """Remove a process that is gone for good; the transport calls this."""
        with self.step():
            if self.lost(id) is not None:
                return
            peer = self.directory.remove(id, how)
            lost = self.lost(id)
            assert lost is not None
            for call in self.calls.all(id):
                self.todo.append(partial(self.caller.fail, call, self.lost(id) or lost))
            self.todo.append(partial(self.gradients.lost, id, lost))
            self.values.died(id)
            self.todo.append(partial(self.gatherings.died, peer.info.name, lost))

    # --- receiving ---------------------------------------------------------------------------

    def receive(self, message: RpcMessage, memories: Sequence[torch.Tensor]) -> Work | None:
        """Receive a message; the transport calls this. Returns the work for a thread, if any."""
        kind = message.kind
        received, called = Received(message, memories), kind in _CALLS
        if message.link or message.body.references or kind == MAKE:
            self._receive_tables(received, called)
        if called:
            if kind == FETCH:
                return self.callee.fetch(received)
            return self.callee.as_work(partial(self.callee.serve, received))
        if kind == GRADIENTS:
            return self._receive_gradients(received)
        if kind == REPORT:
            return None
        if message.make is not None:
            with self.step():
                self.values.held(message.sender, message.make)
        return self.caller.answered(received)

    def _receive_gradients(self, received: Received) -> Work | None:
        tag = received.message.backward
        if tag is None:
            raise TypeError("gradients without a backward pass")
        read = partial(self.payloads.unpack, received)
        work = partial(self.gradients.arrive, tag, received.message.sender, read)
        if self.gradients.waits(tag.backward, work):
            return None
        return self.callee.as_work(work)

    def _receive_tables(self, received: Received, called: bool) -> None:
        """Handle reports, and count references before their message is unpacked."""
        message, sender = received.message, received.message.sender
        with self.step(except_for=sender if called else -1):
            for body in self.directory.receive(sender, message.link):
                topic, report = body[0], body[1:]
                if topic == REFERENCES:  # in this order, and before the references of the body
                    self.values.hear(sender, report)
                elif topic == PASSES:
                    self.todo.append(partial(self.gradients.receive, sender, report))
                else:
                    raise ValueError(f"a report of the unknown topic {topic}")
            rows = message.body.references
            received.references = [self.values.take(row, sender) for row in rows]
            if message.kind == MAKE:
                if message.make is None:
                    raise TypeError("a call that makes a value, without a reference")
                self.values.take_make(message.make, sender)

    # --- sending -----------------------------------------------------------------------------

    def send(
        self,
        peer: Peer,
        kind: MessageType,
        number: int = 0,
        packed: Packed = NOTHING,
        tag: GradientTag | None = None,
        make: RefId | None = None,
        backward: PassTag | None = None,
        patient: bool = False,
    ) -> Outbox | None:
        """Send a message, and with it the reports that are queued for the process.

        `patient`, and the result: as of the transport.

        Raises:
            PeerLost: The process is gone.
        """
        link: tuple[Numbered, ...] = ()
        if peer.queued or peer.confirmed:
            with self.lock:
                self.values.report_confirmed(peer)
                link = self.directory.take(peer)
        if kind is REPORT and not link:
            return None
        devices = None
        if self.device_maps and kind in _CALLS:
            devices = self.payloads.devices_back(peer.info)
        message = RpcMessage(
            kind, self.me.id, number, packed.body, (), tag, make, link, devices, backward
        )
        return self.transport.send(peer.id, message, packed.memories, patient)

    def send_gradients(self, to: int, tag: PassTag, gradients: tuple[Any, ...]) -> None:
        """Send gradients of a backward pass.

        Raises:
            PeerLost: The process is gone.
        """
        peer = self.directory.reach(self.info(to))
        packed = self.payloads.pack_gradients(gradients, peer.info)
        self.send(peer, GRADIENTS, packed=packed, backward=tag)

    def queue(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """In a `step`: queue a report, which arrives after those that were sent before it.

        Args:
            to: The receiver; if it is gone, nothing is sent.
            topic: `REFERENCES` or `PASSES`.
            body: The report.
            hurry: Whether it is sent at once, or with the next message or a little later.
        """
        self.directory.queue(to, bytes((topic,)) + body, hurry)

    def step(self, except_for: int = -1) -> AbstractContextManager[None]:
        """Hold the lock in a block; after it, run the actions on the list and send queued messages.

        Args:
            except_for: A process to which queued messages are not sent yet: an answer follows.
        """
        return _LockedStep(self, except_for)

    def flush(self, except_for: int = -1) -> None:
        """Send queued messages."""
        with self.lock:
            due = [peer for id, peer in self.directory.due.items() if id != except_for]
        for peer in due:
            self._send_waiting(peer)

    def _send_waiting(self, peer: Peer) -> None:
        with suppress(PeerLost):  # `died` handles that
            self.send(peer, REPORT)

    # --- running code of the program ---------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Run work in a thread of the transport."""
        if self.closed:
            work()
        else:
            self.transport.submit(work)

    def release(self, only: list[Value | None]) -> None:
        """Free the value in a list, its last reference, where its finalizer may make calls."""
        value = type(only[0].value) if only[0] is not None else None
        if value not in _WITHOUT_FINALIZERS:
            self.submit(Completion(self.callee.as_work(only.clear)))

    def method(self, owner: object, name: str) -> Function:
        """Return a method of an object that others may call.

        Raises:
            RpcError: It is not allowed.
        """
        return getattr(owner, name) if self.allow is None else self.allow.method(owner, name)

    # --- statistics, and the end -------------------------------------------------------------

    def activity(self) -> tuple[int, int]:
        """Return how many calls were made here, and how many are pending or run here."""
        with self.lock:
            waiting = sum(call.counted for call in self.calls.all())
            completing = self.callee.num_running + len(self.caller.uncompleted)
            return self.calls.made, waiting + completing

    def debug_info(self) -> dict[str, str]:
        """Return counts of calls and references, with torch's names."""
        with self.lock:
            calls = self.calls.all()
            owned, holds, unsettled = self.values.counts
            counts = {
                "num_owner_rrefs": owned,
                "num_pending_users": unsettled,
                "num_pending_futures": sum(call.kind == MAKE for call in calls),
                "num_forks": holds,
                "agent.num_pending_requests": len(calls),
                "agent.num_running_requests": self.callee.num_running,
                "agent.num_requests": self.calls.made,
            }
        return {name: str(count) for name, count in counts.items()}

    def close(self, known: bool = False) -> None:
        """End RPC in this process; calls under way raise.

        Args:
            known: Whether all others know that it ends, so that it need not notify them.
        """
        with self.lock:
            if self.closed:
                return
            self.calls.closed = True
        self.caller.close()
        self.transport.close(known)
        self.timers.close()
        self.recorder.close()
        self.values.close()
