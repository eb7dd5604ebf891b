"""The agent: one process's part in remote calls.

It knows the other processes, receives messages, and sends them, with what else is queued for their
receivers. Its parts are the calls that it makes (`caller`), those that it runs (`callee`), the
values of its messages (`payloads`), and the values that references stand for (`values`).

Threads: one lock guards all tables. No message is sent, and no code of the program runs, while it
is held: a step puts such actions on a list, and they run after the step (`Agent.step`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc.allow import Allowed
from dure.rpc.callee import Callee
from dure.rpc.caller import Caller
from dure.rpc.directory import Directory, Peer
from dure.rpc.envelope import Completion, Envelope, GradientTag, Kind, Received, Transport, Work
from dure.rpc.links import Numbered
from dure.rpc.message import Packed
from dure.rpc.names import WorkerInfo
from dure.rpc.payloads import NOTHING, Function, Payloads
from dure.rpc.recording import Recorder
from dure.rpc.references import RefId
from dure.rpc.termination import Gatherings
from dure.rpc.timers import Timers
from dure.rpc.values import TOPIC, Value, Values

if TYPE_CHECKING:
    from dure.rpc.autograd.backward import Contexts

__all__ = ["Agent"]

_CALLS = frozenset({Kind.CALL, Kind.MAKE, Kind.FETCH})
_NO_CONTEXT = nullcontext()
_WITHOUT_FINALIZERS = frozenset({None, type(None), bool, int, float, str, bytes, torch.Tensor})
"""Types of values that run no code of the program when they are freed."""


class _Step:
    """See `Agent.step`; not a generator, which would cost as much as the rest of a small step."""

    def __init__(self, agent: Agent, except_for: int) -> None:
        self._agent, self._except_for = agent, except_for

    def __enter__(self) -> None:
        self._agent.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        agent = self._agent
        todo = [] if kind is not None else agent.todo[:]
        del agent.todo[: len(todo)]
        agent.lock.release()
        for action in todo:
            action()
        if kind is None and agent.directory.due:
            agent.flush(self._except_for)


class Agent:
    """The agent of a process.

    Args:
        me: This process.
        transport: Carries messages; not started yet.
        timeout: Of calls that have none, in seconds; 0 is none.
        allow: What others may call; None: everything.
        static: Whether no process joins later.

    Attributes:
        caller: The calls of this process.
        callee: The calls of others that run here.
        payloads: Packs and unpacks values.
        values: The values of references.
        directory: The processes.
        gradients: The contexts of distributed autograd, if there are any.
        device_maps: For each worker, by name, the worker's device for each device of this process.
        lock: Guards all tables.
        todo: Actions that run after a step.
    """

    def __init__(
        self,
        me: WorkerInfo,
        transport: Transport,
        timeout: float = 60.0,
        allow: Allowed | None = None,
        static: bool = True,
    ) -> None:
        self.me, self.transport, self.timeout, self.static = me, transport, timeout, static
        self.allow = allow
        self.gradients: Contexts | None = None
        self.device_maps: Mapping[str, Mapping[torch.device, torch.device]] = {}
        self.timers = Timers()
        self.lock = threading.RLock()  # reentrant, so that a finalizer in a step gets an error
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
        self._handlers: dict[int, Callable[[int, bytes], None]] = {}

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
                self.values.joined(id)
                self.recorder.joined(id)

    def died(self, id: int, how: str) -> None:
        """Remove a process for good; the transport calls this."""
        with self.step():
            if self.lost(id) is not None:
                return
            peer = self.directory.remove(id, how)
            lost = self.lost(id)
            assert lost is not None
            for call in self.calls.all(id):
                self.todo.append(partial(self.caller.fail, call, self.lost(id) or lost))
            self.todo.append(partial(self.calls.unblock, peer))
            if self.gradients is not None:
                self.todo.append(partial(self.gradients.lost, id, lost))
            self.values.died(id)
            self.todo.append(partial(self.gatherings.died, peer.info.name, lost))

    def broken(self, id: int) -> None:
        """Fail calls whose connection broke; the transport calls this."""
        with self.step():
            peer = self.directory.get(id)
            if peer is None:
                return
            text = f"the connection to worker {peer.info.name!r} broke: "
            for call in self.calls.all(id):
                error = RpcError(
                    text + "the call may have run",
                    seen=call.what,
                    fix="Call again if running twice does no harm.",
                )
                self.todo.append(partial(self.caller.fail, call, error))
            if self.gradients is not None:
                error = RpcError(text + "gradients were lost")
                self.todo.append(partial(self.gradients.lost, id, error))
            self.values.broken(id)
            self.directory.again(id)

    # --- receiving ---------------------------------------------------------------------------

    def receive(self, envelope: Envelope, memories: Sequence[torch.Tensor]) -> Work | None:
        """Receive a message; the transport calls this. Returns the work for a thread, if any."""
        kind = envelope.kind
        received, called = Received(envelope, memories), kind in _CALLS
        if envelope.link or envelope.body.references or kind == Kind.MAKE:
            self._receive_tables(received, called)
        for number in envelope.made:
            self.caller.made(number, received)
        if called:
            return self.callee.accept(received)
        if kind == Kind.GRADIENTS:
            return self._receive_gradients(received)
        if kind == Kind.RELIABLE:
            return None
        return self.caller.answered(received)

    def _receive_gradients(self, received: Received) -> Work | None:
        contexts, backward = self.gradients, received.envelope.make
        if contexts is None or backward is None:
            return None
        work = partial(contexts.arrive, backward, partial(self.payloads.unpack, received))
        if contexts.waits(backward, work):
            return None
        return self.callee.as_work(lambda _: work())

    def _receive_tables(self, received: Received, called: bool) -> None:
        """Handle reliable messages, and count references before their message is unpacked."""
        envelope, sender = received.envelope, received.envelope.sender
        with self.step(except_for=sender if called else -1):
            for body in self.directory.receive(sender, envelope.link):
                if body[0] == TOPIC:
                    self.values.hear(sender, body[1:])
                else:
                    self.todo.append(partial(self._handlers[body[0]], sender, body[1:]))
            for work in self.directory.take_deferred(sender):
                self.todo.append(partial(self.submit, self.callee.as_work(work)))
            rows = envelope.body.references
            received.references = [self.values.take(row, sender) for row in rows]
            if envelope.kind == Kind.MAKE:
                assert envelope.make is not None
                received.made = self.values.take_make(envelope.make, sender)

    # --- sending -----------------------------------------------------------------------------

    def send(
        self,
        peer: Peer,
        kind: Kind,
        number: int = 0,
        packed: Packed = NOTHING,
        tag: GradientTag | None = None,
        make: RefId | None = None,
        devices: dict[str, str] | None = None,
    ) -> None:
        """Send a message, and with it the reliable messages that are queued for the process.

        Raises:
            PeerLost: The process is gone.
        """
        link: tuple[Numbered, ...] = ()
        made: tuple[int, ...] = ()
        if peer.queued or peer.made or peer.link.acknowledged < peer.link.received:
            with self.lock:
                link, made = self.directory.take(peer)
        if kind is Kind.RELIABLE and not link and not made:
            return
        envelope = Envelope(
            kind, self.me.id, number, packed.body, (), tag, make, link, devices, made
        )
        if kind is Kind.FETCH:
            envelope.after = peer.link.sent
        self.transport.send(peer.id, envelope, packed.memories)

    def send_gradients(self, to: int, backward: tuple[int, int], values: tuple[Any, ...]) -> None:
        """Send gradients of a backward pass; they are lost if the connection breaks.

        Raises:
            PeerLost: The process is gone.
        """
        peer = self.directory.reach(self.info(to))
        packed = self.payloads.pack_gradients(values, peer.info)
        self.send(peer, Kind.GRADIENTS, packed=packed, make=backward)

    def send_reliably(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """Send a message that arrives once, as long as both processes live.

        Args:
            to: The receiver.
            topic: 1 to 255; the receiver's handler of this topic (`on`) is called.
            body: The message.
            hurry: Whether it is sent at once, or with the next message or a little later.

        Raises:
            PeerLost: The process is gone.
        """
        with self.step():
            lost = self.lost(to)
            if lost is not None:
                raise lost
            self.queue(to, topic, body, hurry)

    def on(self, topic: int, handler: Callable[[int, bytes], None]) -> None:
        """Set the function called with sender and body of messages; it must return quickly."""
        self._handlers[topic] = handler

    def queue(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """With the lock: leave a reliable message for the next message that is sent."""
        self.directory.queue(to, bytes((topic,)) + body, hurry)

    def step(self, except_for: int = -1) -> AbstractContextManager[None]:
        """Hold the lock within; after it, run what is on the list and send what is queued.

        Args:
            except_for: The process that gets nothing yet, because an answer to it follows.
        """
        return _Step(self, except_for)

    def flush(self, except_for: int = -1) -> None:
        """Send what is queued."""
        with self.lock:
            due = [peer for id, peer in self.directory.due.items() if id != except_for]
        for peer in due:
            self._send_waiting(peer)

    def _send_waiting(self, peer: Peer) -> None:
        with suppress(PeerLost):  # `died` is called, or has been
            self.send(peer, Kind.RELIABLE)

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
            self.submit(Completion(self.callee.as_work(lambda _: only.clear())))

    def serving(self, tag: GradientTag | None) -> AbstractContextManager[None]:
        """Return the context of distributed autograd in which a call is served."""
        if tag is None or self.gradients is None:
            return _NO_CONTEXT
        return self.gradients.serving(tag)

    def method(self, owner: object, name: str) -> Function:
        """Return a method of an object that others may call.

        Raises:
            RpcError: They may not.
        """
        return getattr(owner, name) if self.allow is None else self.allow.method(owner, name)

    # --- figures, and the end ----------------------------------------------------------------

    def activity(self) -> tuple[int, int]:
        """Return how many calls were made here, and how many are under way or run here now."""
        with self.lock:
            waiting = sum(call.counted for call in self.calls.all())
            return self.calls.made, waiting + self.callee.num_running

    def debug_info(self) -> dict[str, str]:
        """Return counts of calls and references, for people, with torch's names."""
        with self.lock:
            calls = self.calls.all()
            owned, holds, _, unsettled = self.values.counts
            figures = {
                "num_owner_rrefs": owned,
                "num_pending_users": unsettled,
                "num_pending_futures": sum(call.kind == Kind.MAKE for call in calls),
                "num_forks": holds,
                "agent.num_pending_requests": len(calls),
                "agent.num_running_requests": self.callee.num_running,
                "agent.num_requests": self.calls.made,
                "agent.bytes_in_flight": self.calls.nbytes,
            }
        return {name: str(figure) for name, figure in figures.items()}

    def held(self) -> list[str]:
        """Describe the values that others still hold of this process, and it of others."""
        return self.values.held({worker.id: worker.name for worker in self.workers})

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
