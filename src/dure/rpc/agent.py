"""The agent: what a process does with the messages of remote calls.

**A call** has a number of the caller's. Its function and arguments are packed, sent, unpacked by a
thread of the callee that has a slot, and run there; the answer has the same number. Each call ends
once, by whatever takes it out of the table first: its answer, its timeout, a connection that broke
(it may have run, and is not sent again), or the callee's death.

Threads: one lock guards all tables. Nothing is sent, and
no code of the program's runs, with it held: what a step leaves to be done is put on a list, and
done after (`step`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from math import inf, isnan
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from dure.errors import DureError, PeerLost, RpcError, UsageError
from dure.rpc import failures
from dure.rpc.allow import Allowed
from dure.rpc.calls import Call, CallFuture, Calls
from dure.rpc.current import here
from dure.rpc.directory import Directory, Peer
from dure.rpc.envelope import Completion, Envelope, GradientTag, Kind, Transport, Work
from dure.rpc.functions import MARK, Later
from dure.rpc.links import Numbered
from dure.rpc.message import Body, Packed, find_function, name_of, pack, pack_plain, rebuild, unpack
from dure.rpc.names import WorkerInfo
from dure.rpc.recording import Recorder, served
from dure.rpc.references import RefId
from dure.rpc.rref import RRef
from dure.rpc.termination import Gatherings
from dure.rpc.timers import Timers
from dure.rpc.values import TOPIC, Value, Values
from dure.trace import logs
from dure.trace.spans import listeners

if TYPE_CHECKING:
    from dure.rpc.autograd.backward import Contexts

__all__ = ["UNSET", "Agent", "Args", "Function", "Kwargs", "To"]

To = str | int | WorkerInfo
"""A worker, by name, by id, or itself."""

Function = Callable[..., Any]
Args = Sequence[Any] | None
Kwargs = dict[str, Any] | None

UNSET = -1.0
"""A timeout that is not given: the default holds. 0 is none."""

_CALLS = frozenset({Kind.CALL, Kind.MAKE, Kind.FETCH})
_NOTHING = Packed()
_NO_CONTEXT = nullcontext()
_WITHOUT_END = frozenset({None, type(None), bool, int, float, str, bytes, torch.Tensor})
"""Types of values that run nothing of the program's when they end."""

_log = logs.logger("rpc")
_Future = torch.futures.Future.__mro__[1]  # of C++: what `then` returns


class _Came(msgspec.Struct, eq=False):
    """A message that came."""

    envelope: Envelope
    memories: Sequence[torch.Tensor] = ()
    references: Sequence[RRef[Any]] = ()
    made: bool = True  # False: its value was given up


class _Step:
    """See `Agent.step`; no generator, which costs as much as all the rest of a small step."""

    def __init__(self, agent: Agent, but: int) -> None:
        self._agent, self._but = agent, but

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
            agent.flush(self._but)


class Agent:
    """The one of a process.

    Args:
        me: This process.
        transport: Not started yet.
        timeout: Of calls that give none, in seconds; 0 is none.
        allow: What others may call; None: everything.
        static: Whether nobody joins.

    Attributes:
        gradients: Of distributed autograd, when there is one.
        device_maps: For each worker, by name, where tensors of this process's devices belong there.
        lock: Guards all tables.
        todo: What is to be done after a step.
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
        self.gradients: Contexts | None = None
        self.device_maps: Mapping[str, Mapping[torch.device, torch.device]] = {}
        self.timers = Timers()
        self.lock = threading.RLock()  # so that a finalizer within can tell (`call`)
        self.todo: list[Callable[[], None]] = []
        self.allow, self._find = allow, None if allow is None else allow.find
        self.directory = Directory(self.timers, self._send_waiting, transport.look)
        self.find, self.info = self.directory.find, self.directory.info
        self.lost = self.directory.lost
        self.calls = Calls(self.lock, transport, self.timers, self._fail)
        self._handlers: dict[int, Callable[[int, bytes], None]] = {}
        self._busy: set[Callable[..., None]] = set()  # calls that run here, or wait for a thread
        self._recorder = Recorder(me)
        self.values = Values(self, self._never_made)
        self.gatherings = Gatherings(self)

    def start(self) -> None:
        """Begin to receive."""
        self._recorder.start()
        self.transport.start(self)

    # --- who is there ------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerInfo]:
        """Who is there, this process included, by id."""
        with self.lock:
            return self.directory.workers()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self.calls.closed

    def joined(self, id: int, name: str) -> None:
        """Take note of a process; the transport calls this."""
        with self.step():
            if self.lost(id) is None:
                self.directory.add(WorkerInfo(name, id))
                self.values.joined(id)
                self._recorder.joined(id)

    def died(self, id: int, how: str) -> None:
        """Take note that a process is gone for good; the transport calls this."""
        with self.step():
            if self.lost(id) is not None:
                return
            peer = self.directory.remove(id, how)
            lost = self.lost(id)
            assert lost is not None
            for call in self.calls.all(id):
                self.todo.append(partial(self._fail, call, self.lost(id) or lost))
            self.todo.append(partial(self.calls.unblock, peer))
            if self.gradients is not None:
                self.todo.append(partial(self.gradients.lost, id, lost))
            self.values.died(id)
            self.todo.append(partial(self.gatherings.died, peer.info.name, lost))

    def broken(self, id: int) -> None:
        """Take note that a connection broke; the transport calls this."""
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
                self.todo.append(partial(self._fail, call, error))
            if self.gradients is not None:
                error = RpcError(text + "gradients were lost")
                self.todo.append(partial(self.gradients.lost, id, error))
            self.values.broken(id)
            self.directory.again(id)

    # --- calls -------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> Any:
        """Call a function of another process (`api.rpc_sync`)."""
        return self.wait(self.call(to, (func, args, kwargs), timeout))

    def rpc_async(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> CallFuture:
        """Begin to call a function of another process (`api.rpc_async`)."""
        future = CallFuture()
        future.agent = self
        future.call = self.call(to, (func, args, kwargs), timeout, future.told)
        future.call.quick = True
        return future

    def remote(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> RRef[Any]:
        """Begin to make a value at another process (`api.remote`)."""
        worker = self.find(to)
        if not callable(func):
            raise _not_callable(func)
        ref = self.values.begin(worker.id)
        rref = RRef[Any].received(self, ref, worker.id, True)
        try:
            rref.made_by(self.call(worker, (func, args, kwargs), timeout, make=ref))
        except Exception:
            self.values.not_sent((), ref)
            raise
        return rref

    def fetch(self, ref: RefId, owner: WorkerInfo, timeout: float) -> Any:
        """Return the value of a reference."""
        return self.wait(self.call(owner, None, timeout, make=ref))

    def ask(self, to: To, func: Function, args: tuple[Any, ...], timeout: float) -> Any:
        """Call a function of RPC's own, for which no shutdown waits.

        The thread receives nothing meanwhile: it may wait for long, and others can run what comes.
        """
        done = threading.Event()
        call = self.call(to, (func, args, None), timeout, lambda _: done.set(), counted=False)
        done.wait()
        return self.result(call)

    def method(self, owner: object, name: str) -> Function:
        """Return a method of an object that others may call.

        Raises:
            RpcError: They may not.
        """
        return getattr(owner, name) if self.allow is None else self.allow.method(owner, name)

    def call(
        self,
        to: To,
        what: tuple[Function, Args, Kwargs] | None,
        timeout: float = UNSET,
        told: Callable[[Call], None] | None = None,
        make: RefId | None = None,
        counted: bool = True,
    ) -> Call:
        """Make a call.

        Waits, if this is a thread of the program's and too much is under way. A callee that is gone
        is the call's outcome, no error of this.

        Args:
            to: The callee.
            what: What is called, and with what; None: fetch the value `make`.
            timeout: Seconds; `UNSET`, or 0 for none.
            told: Told of the end.
            make: Where the value is to stay.
            counted: See `Call`.

        Raises:
            RpcError: What it says cannot be sent.
        """
        if self.lock._is_owned():  # pyright: ignore
            raise RpcError(
                "a finalizer called while its thread was at work for RPC",
                fix="Python runs `__del__` of circles anywhere: leave the call to a thread.",
            )
        peer = self.directory.reach(to)
        function, packed = "to_here", _NOTHING
        kind = Kind.CALL if make is None else Kind.MAKE if what is not None else Kind.FETCH
        try:
            seconds = self.timeout if timeout < 0 else timeout
            if isnan(seconds):
                raise _no_timeout(timeout)
        except TypeError:
            raise _no_timeout(timeout) from None
        if what is not None:
            function = getattr(what[0], "__qualname__", None) or type(what[0]).__qualname__
            packed = self._pack_call(*what, peer.info)
        if self.values.gone:
            self.values.forget_gone(but=peer.id)
        call = Call(
            kind=kind,
            peer=peer,
            function=function,
            ref=make,
            ticket=self.transport.ticket(),
            seconds=seconds,
            deadline=monotonic() + seconds if seconds > 0 else inf,
            nbytes=packed.nbytes,
            told=told,
            counted=counted,
            noted=self._recorder.begin(kind, peer.id, function, told is None),
        )
        tag = None
        try:
            if self.gradients is not None:
                tag = self.gradients.sending(peer.id, call.what, packed.sources)
            is_under_way = self.calls.add(call, not here.serves)
        except BaseException:  # Ctrl-C while waiting for room, too
            self.values.not_sent(packed.body.references)
            raise
        if not is_under_way:
            self.values.not_sent(packed.body.references)
            self._end_at_once(call, self.lost(peer.id) or _closed())
            return call
        devices = self._devices(peer.info) if self.device_maps else None
        try:
            self._send(peer, kind, call.number, packed, tag, make, devices)
        except PeerLost as error:
            self._fail(call, self.lost(peer.id) or error)
        except BaseException:
            if self.calls.take(call.number) is not None:
                self.values.not_sent(packed.body.references)
            raise
        return call

    def wait(self, call: Call) -> Any:
        """Wait until a call has ended, and return its value; the thread receives meanwhile.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        self.transport.wait(call.ticket)
        return self.result(call)

    def wait_until_told(self, call: Call) -> None:
        """Wait until who wants to be told of a call's end has been.

        It may be this thread that tells, unless that runs code of the program's: what that waits
        for may be what this thread does next.
        """
        call.awaited = call.quick
        try:
            self.transport.wait(call.ticket)
            if call.quick:
                self._tell(call)
        finally:
            call.awaited = False
            if call.told is not None and call.outcome is not None:
                self._submit(Completion(self._as_work(lambda _: self._tell(call))))

    def result(self, call: Call) -> Any:
        """Return the value that a call has ended with.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        outcome = call.outcome or _closed()
        if isinstance(outcome, Exception):
            raise outcome
        body = outcome.envelope.body
        if outcome.envelope.kind == Kind.ERROR:
            raise failures.decode(body.pickled, self._find)
        if not (body.pickled or body.inline or body.tensors or body.references):
            return None
        return self._unpack(outcome)[0]

    def failed(self, call: Call) -> Callable[[], Exception] | None:
        """Return what makes the exception that the callee answered a call with, if it did."""
        outcome = call.outcome
        if isinstance(outcome, _Came) and outcome.envelope.kind == Kind.ERROR:
            return partial(failures.decode, outcome.envelope.body.pickled, self._find)
        return None

    def when_done(self, call: Call, told: Callable[[Call], None]) -> None:
        """Have somebody told of a call's end that nobody waits for."""
        call.told = told
        if call.outcome is not None:
            self._tell(call)

    # --- how calls end -----------------------------------------------------------------------

    def _end(self, call: Call, outcome: _Came | Exception) -> Work | None:
        """End a call that is in no table any more; return what a worker must do for it."""
        call.outcome = outcome
        self._recorder.end(call.noted, outcome if isinstance(outcome, Exception) else None)
        if call.told is None or call.awaited:
            self.transport.complete(call.ticket)
            return None
        return Completion(self._as_work(lambda _: self._tell(call)))

    def _end_at_once(self, call: Call, outcome: _Came | Exception) -> None:
        work = self._end(call, outcome)
        if work is not None:
            self._submit(work)

    def _submit(self, work: Work) -> None:
        if self.closed:
            work()
        else:
            self.transport.submit(work)

    def let_go(self, only: list[Value | None]) -> None:
        """Let go of the value in a list, which nothing else refers to, where its end may call."""
        value = type(only[0].value) if only[0] is not None else None
        if value not in _WITHOUT_END:
            self._submit(Completion(self._as_work(lambda _: only.clear())))

    def _tell(self, call: Call) -> None:
        """Tell who wants to be told, once."""
        with self.lock:
            told, call.told = call.told, None
        if told is not None:
            told(call)

    def _fail(self, call: Call, error: Exception) -> None:
        """End a call without an answer, if it has not ended."""
        if self.calls.take(call.number) is not None:
            self._end_at_once(call, error)

    def _never_made(self, ref: RefId) -> None:
        """With the lock: end calls that fetch a value that was never made."""
        for call in self.calls.all():
            if call.ref == ref and call.kind == Kind.FETCH:
                error = RpcError("the value was never made", op=call.what)
                self.todo.append(partial(self._fail, call, error))

    # --- what comes --------------------------------------------------------------------------

    def receive(self, envelope: Envelope, memories: Sequence[torch.Tensor]) -> Work | None:
        """Take a message; the transport calls this. Returns what is to be run, if anything."""
        kind, body = envelope.kind, envelope.body
        called, came = kind in _CALLS, _Came(envelope, memories)
        if envelope.link or body.references or kind == Kind.MAKE:
            self._take_along(came, called)
        for number in envelope.made:
            if (call := self.calls.take(number, envelope.sender)) is not None:
                self._end_at_once(call, _Came(Envelope(Kind.ANSWER, call.peer.id)))
        if called:
            work = partial(self._serve, came)
            if listeners:
                work = partial(served, self.me.id, envelope, monotonic_ns(), work)
            return self._as_work(work)
        if kind == Kind.GRADIENTS:
            return self._gradients_came(came)
        if kind == Kind.RELIABLE:
            return None
        call = self.calls.take(envelope.number, envelope.sender)
        return None if call is None else self._end(call, came)

    def _gradients_came(self, came: _Came) -> Work | None:
        hooks, backward = self.gradients, came.envelope.make
        if hooks is None or backward is None:
            return None
        work = partial(hooks.arrive, backward, partial(self._unpack, came))
        return None if hooks.waits(backward, work) else self._as_work(lambda _: work())

    def _take_along(self, came: _Came, called: bool) -> None:
        """Take note of what must arrive, and of references."""
        envelope, sender = came.envelope, came.envelope.sender
        with self.step(but=sender if called else -1):
            for body in self.directory.receive(sender, envelope.link):
                if body[0] == TOPIC:
                    self.values.hear(sender, body[1:])
                else:
                    self.todo.append(partial(self._handlers[body[0]], sender, body[1:]))
            for work in self.directory.take_deferred(sender):
                self.todo.append(partial(self._submit, self._as_work(work)))
            came.references = [self.values.take(row, sender) for row in envelope.body.references]
            if envelope.kind == Kind.MAKE:
                assert envelope.make is not None
                came.made = self.values.take_make(envelope.make, sender)

    def _as_work(self, work: Callable[[RpcError | None], None]) -> Work:
        """Return what a thread of the transport's is to do; it may be the program's code."""
        self._busy.add(work)
        return partial(self._run, work)

    def _run(
        self, work: Callable[[RpcError | None], None], refusal: RpcError | None = None
    ) -> None:
        """Run what was counted as busy: a call, or code of the program's."""
        before = here.serves, here.agent
        here.serves, here.agent = True, self
        try:
            work(refusal)
        finally:
            here.serves, here.agent = before
            self._busy.discard(work)
            if self.directory.due:
                self.flush()

    def _serve(self, came: _Came, refusal: RpcError | None) -> None:
        """Run a call, and answer it; or answer that there is no thread for it."""
        envelope = came.envelope
        try:
            if refusal is not None:
                raise refusal
            if envelope.kind == Kind.FETCH:
                self._fetch(came)
                return
            if not came.made:
                raise RpcError("this call was given up when a connection broke, and was not run")
            with self._serving(envelope.gradients):
                self._call_here(came)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _call_here(self, came: _Came) -> None:
        envelope = came.envelope
        values, kwargs = self._unpack(came), {}
        if name := envelope.body.function:
            try:
                function = find_function(name, self.allow and self.allow.function)
            except (AttributeError, ImportError) as error:
                raise _unknown(error) from error
        else:
            function, values, kwargs = values
        if self.allow is not None:
            self.allow.check(function)
        result = function(*values, **kwargs)
        del values, kwargs
        if hasattr(function, MARK):
            result = Later(result)
        if isinstance(result, Later):
            if not isinstance(result.future, _Future):
                raise RpcError(
                    "Functions decorated with @rpc.async_function must return a "
                    f"torch.futures.Future object, but got {result.future!r}"
                )
            self._answer_later(envelope, result)
        else:
            self._answer(envelope, result)

    def _answer_later(self, envelope: Envelope, later: Later) -> None:
        def answer(done: torch.futures.Future[Any]) -> None:
            before, here.agent = here.agent, self
            try:
                with self._serving(envelope.gradients):
                    self._answer(envelope, done.value())
            except BaseException as error:
                self._answer_error(envelope, error)
            finally:
                here.agent = before
                self._busy.discard(answer)

        if later.counted:
            self._busy.add(answer)
        later.future.add_done_callback(answer)

    def _serving(self, tag: GradientTag | None) -> AbstractContextManager[None]:
        if tag is None or self.gradients is None:
            return _NO_CONTEXT
        return self.gradients.serving(tag)

    def _fetch(self, came: _Came) -> None:
        """Answer a process that wants a value, as soon as it is there."""
        envelope = came.envelope
        ref, sender = envelope.make, envelope.sender
        assert ref is not None
        with self.lock:
            if self.directory.defer(sender, envelope.after, partial(self._serve, came)):
                return
            value = self.values.find(ref, sender, partial(self._send_value, envelope))
            later = value is not None and not value.done
        if value is None:
            raise RpcError(
                "there is no such value any more, or the caller holds no reference to it",
                op="to_here",
            )
        if not later:
            self._send_value(envelope, value)

    def _send_value(self, envelope: Envelope, value: Value) -> None:
        if value.error is not None:
            self._answer_error(envelope, value.error)
            return
        try:
            with self._serving(envelope.gradients):
                self._answer(envelope, value.value)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _answer(self, call: Envelope, result: Any) -> None:
        if call.kind == Kind.MAKE:
            assert call.make is not None
            with self.lock:
                self.directory.made(call.sender, call.number)
            self.values.set(call.make, result)
            return
        packed = _NOTHING
        if result is not None:
            back = partial(self._device_back, call)
            packed = self._pack((result,), call.sender, back)
        tag = None
        if self.gradients is not None:
            what = f"the result of {call.gradients.what}" if call.gradients is not None else ""
            tag = self.gradients.sending(call.sender, what, packed.sources)
        self._reply(call, Kind.ANSWER, packed, tag)

    def _answer_error(self, call: Envelope, error: BaseException) -> None:
        _log.warning("a call of worker %d failed here", call.sender, exc_info=error)
        if call.kind == Kind.MAKE:
            assert call.make is not None
            self.values.set(call.make, None, error)
        self._reply(call, Kind.ERROR, Packed(Body(failures.encode(error, self.me))), None)

    def _reply(self, call: Envelope, kind: Kind, packed: Packed, tag: GradientTag | None) -> None:
        peer = self.directory.get(call.sender)
        with suppress(PeerLost):
            if peer is not None:
                self._send(peer, kind, call.number, packed, tag)
                return
        self.values.not_sent(packed.body.references)

    # --- what must arrive --------------------------------------------------------------------

    def tell(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """Send a message that must arrive, once, as long as both processes live.

        Args:
            to: Who gets it.
            topic: 1 to 255; who has said `on` there gets it.
            body: The message.
            hurry: Whether it goes at once; otherwise with the next message, or a little later.

        Raises:
            PeerLost: The process is gone.
        """
        with self.step():
            lost = self.lost(to)
            if lost is not None:
                raise lost
            self.queue(to, topic, body, hurry)

    def send_gradients(self, to: int, backward: tuple[int, int], values: tuple[Any, ...]) -> None:
        """Send gradients of a backward pass; they are lost with the connection.

        Raises:
            PeerLost: The process is gone.
        """
        peer = self.directory.reach(self.info(to))
        packed = self._pack(values, to, partial(self._device_there, peer.info))
        self._send(peer, Kind.GRADIENTS, packed=packed, make=backward)

    def on(self, topic: int, handler: Callable[[int, bytes], None]) -> None:
        """Have a function called with sender and body of messages; it must return quickly."""
        self._handlers[topic] = handler

    def queue(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """With the lock: leave a message that must arrive for the next one that is sent."""
        self.directory.queue(to, bytes((topic,)) + body, hurry)

    def step(self, but: int = -1) -> AbstractContextManager[None]:
        """While within: the lock is held; after, what is left is done, and what is queued is sent.

        Args:
            but: To whom nothing is sent yet, for an answer will be.
        """
        return _Step(self, but)

    def flush(self, but: int = -1) -> None:
        """Send what is queued."""
        with self.lock:
            due = [peer for id, peer in self.directory.due.items() if id != but]
        for peer in due:
            self._send_waiting(peer)

    def _send_waiting(self, peer: Peer) -> None:
        with suppress(PeerLost):  # `died` comes, or has come
            self._send(peer, Kind.RELIABLE)

    # --- messages ----------------------------------------------------------------------------

    def _send(
        self,
        peer: Peer,
        kind: Kind,
        number: int = 0,
        packed: Packed = _NOTHING,
        tag: GradientTag | None = None,
        make: RefId | None = None,
        devices: dict[str, str] | None = None,
    ) -> None:
        """Send a message, and what is queued for the process with it."""
        link: tuple[Numbered, ...] = ()
        made: tuple[int, ...] = ()
        if peer.waits:
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

    def _pack_call(self, function: Function, args: Args, kwargs: Kwargs, to: WorkerInfo) -> Packed:
        if not callable(function):
            raise _not_callable(function)
        given = () if args is None else args, {} if kwargs is None else kwargs
        are_some = isinstance(given[0], tuple | Sequence)  # a tuple is looked at first, being quick
        if not (are_some and isinstance(given[1], dict)):  # pyright: ignore
            raise UsageError(
                "a call takes a tuple of arguments, and a dict of those by keyword",
                op="rpc",
                seen=f"args={args!r}, kwargs={kwargs!r}",
                fix='Write args=(x,) for one argument, kwargs={"name": x}.',
            )
        name = "" if kwargs else name_of(function)
        values = tuple(given[0])
        sent = values if name else (function, values, given[1])
        return self._pack(sent, to.id, partial(self._device_there, to), name)

    def _pack(
        self,
        values: tuple[Any, ...],
        to: int,
        device_there: Callable[[torch.device], str],
        function: str = "",
    ) -> Packed:
        packed = pack_plain(values, function, to, RRef)
        if packed is not None:
            return packed
        try:
            return pack(values, to, RRef, device_there, function)
        except RpcError as error:
            self.values.not_sent(getattr(error, "references", ()))
            if isinstance(error.__cause__, DureError):  # of a reference
                raise error.__cause__ from None
            raise

    def _device_there(self, to: WorkerInfo, device: torch.device) -> str:
        device_map = self.device_maps.get(to.name, {})
        if device not in device_map:
            raise ValueError(
                f"a tensor on {device}, and no device map from there to {to.name}: "
                "TensorPipeRpcBackendOptions.set_device_map says where it belongs"
            )
        return str(device_map[device])

    def _device_back(self, call: Envelope, device: torch.device) -> str:
        """Return where a result belongs: the way back of the caller's map, else our own map."""
        there = (call.devices or {}).get(str(device))
        return there or self._device_there(self.info(call.sender), device)

    def _devices(self, to: WorkerInfo) -> dict[str, str] | None:
        """Return where tensors of a callee's devices belong here: the way back of ours."""
        device_map = self.device_maps.get(to.name)
        return {str(b): str(a) for a, b in device_map.items()} if device_map else None

    def _unpack(self, came: _Came) -> Any:
        envelope = came.envelope
        tensors: list[torch.Tensor] = []
        if envelope.body.tensors or envelope.body.inline:
            tensors = rebuild(envelope.body, came.memories)
            if envelope.gradients is not None and self.gradients is not None:
                tensors = self.gradients.receiving(envelope.sender, envelope.gradients, tensors)
        try:
            return unpack(envelope.body, tensors, came.references, self._find)
        except (AttributeError, ImportError) as error:
            raise _unknown(error) from error

    # --- what people see, and the end --------------------------------------------------------

    def activity(self) -> tuple[int, int]:
        """Return how many calls were made here, and how many are under way or run here now."""
        with self.lock:
            waiting = sum(call.counted for call in self.calls.all())
            return self.calls.made, waiting + len(self._busy)

    def debug_info(self) -> dict[str, str]:
        """Return figures of calls and references, for people, with torch's names."""
        with self.lock:
            calls = self.calls.all()
            owned, holds, _, unsettled = self.values.counts
            figures = {
                "num_owner_rrefs": owned,
                "num_pending_users": unsettled,
                "num_pending_futures": sum(call.kind == Kind.MAKE for call in calls),
                "num_forks": holds,
                "agent.num_pending_requests": len(calls),
                "agent.num_running_requests": len(self._busy),
                "agent.num_requests": self.calls.made,
                "agent.bytes_in_flight": self.calls.nbytes,
            }
        return {name: str(figure) for name, figure in figures.items()}

    def held(self) -> list[str]:
        """Return what others still hold of this process, and this process of others."""
        return self.values.held({worker.id: worker.name for worker in self.workers})

    def close(self, known: bool = False) -> None:
        """End: calls under way raise; `known` to all, so that nobody need be told (`Transport`)."""
        with self.lock:
            if self.closed:
                return
            self.calls.closed = True
            calls = self.calls.all()
        for call in calls:
            self._fail(call, _closed())
        self.transport.close(known)
        self.timers.close()
        self._recorder.close()
        self.values.close()


def _not_callable(function: object) -> UsageError:
    return UsageError("function should be callable", op="rpc", seen=repr(function))


def _no_timeout(timeout: object) -> UsageError:
    return UsageError(
        "a timeout is a number of seconds",
        op="rpc",
        seen=repr(timeout),
        fix="0 is none; leave it out for the default.",
    )


def _unknown(error: Exception) -> RpcError:
    return RpcError(
        "a function or class of a message is not known here",
        seen=str(error),
        fix="The RPC pickler does not serialize code: define it, under the same name, in "
        "a module that both have.",
    )


def _closed() -> RpcError:
    return RpcError("RPC was shut down before this call was answered")
