"""Control channels: how a lost host, link or rank becomes one error on all ranks of a group.

**A channel** joins the leaders of two hosts: a ZeroMQ connection beside the engine's, encrypted
with CURVE keys that are made for the group and exchanged through its store; who does not know them
cannot connect. The leader of the lower host listens. As soon as the one leader that it is for has
come, its port is closed to everybody else. Every message carries the channel's token, so that
nothing of another channel or group is believed.

**The watch.** A thread of each leader sends a *heartbeat* down each channel every second, watches
the processes of its own host (pidfd), and looks whether a rank of its host broke the group.

* A channel that breaks: the other leader's process, or its whole host, ended. The kernel says so at
  once, where it still can.
* A channel that is silent for three seconds: the host is gone, or the link is cut.
* A rank of this host died, or broke the group: the abort record goes down all channels.
* A leader that leaves says how many collectives it has ended: who is in one more than that, or
  begins it, waits in vain.

A leader that died said nothing of what it had ended. Its last messages may have come all the same:
so an operation that has begun has half a second to end.

Heartbeats also carry how many collectives the leader has begun, and how many its host has; so who
runs out of time knows which ranks did not come.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.subcomms import SubComms
from dure.errors import RendezvousTimeout
from dure.store.address import outward_address, resolve
from dure.store.identity import myself
from dure.store.listener import listen
from dure.store.monitor import read_event
from dure.store.packets import let_nobody_in

__all__ = ["HEARTBEAT_S", "SILENCE_S", "Channel", "ControlMessage", "Watch", "open_channel"]

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
_LINGER_MS = 100
_LONGEST_MESSAGE = 1 << 18
_HANDSHAKE_MS = 10_000
_LOOK_MS = 50
_ANSWER_S = 0.5
_PAUSE_S = 0.05
_END_S = 0.5
_GOODBYE_S = 2.0


class ControlMessage(msgspec.Struct, array_like=True):
    """What one leader says to another.

    `asked` is an operation for which time is up, or 0; `left` is -1 unless the leader leaves.
    """

    token: bytes = b""
    begun: int = 0
    opened: int = 0
    asked: int = 0
    left: int = -1
    record: AbortRecord | None = None


class _Contact(msgspec.Struct, array_like=True):
    """How a leader can be reached by one other."""

    endpoint: str
    public: bytes
    token: bytes


@dataclass(slots=True, eq=False)
class Channel:
    """A connection to the leader of `host`, and what was heard of it."""

    host: int
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    token: bytes = b""
    listener: int | None = None  # the listening socket's descriptor, which ZeroMQ closes
    heard: float = field(default_factory=time.monotonic)
    known: bool = False
    begun: int = 0
    opened: int = 0
    left: int = -1
    over: bool = False
    lost: float | None = None  # when the leader was lost, or left
    fell_silent: bool = False  # nothing says that its host has died

    def say(self, message: ControlMessage) -> None:
        """Send a message, if anybody is there: else silence or the monitor will tell."""
        message.token = self.token
        with contextlib.suppress(zmq.Again):
            self.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def messages(self) -> Iterator[ControlMessage]:
        """Read all that has come."""
        while True:
            try:
                message = msgspec.msgpack.decode(self.socket.recv(zmq.NOBLOCK), type=ControlMessage)
            except zmq.Again:
                return
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if secrets.compare_digest(message.token, self.token):
                yield message

    def close_port(self) -> None:
        """Let nobody else in; where the system cannot, the handshake alone keeps strangers out."""
        if self.listener is not None:
            with (
                contextlib.suppress(OSError),
                sockets.socket(fileno=os.dup(self.listener)) as listener,
            ):
                let_nobody_in(listener)

    def close(self) -> None:
        """Close, with a moment for what was said last."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0 if self.over else _LINGER_MS)


def open_channel(
    context: zmq.Context[zmq.Socket[bytes]],
    hosts: tuple[int, int],
    address: str,
    options: BackendOptions,
) -> Channel:
    """Open the channel between two leaders; both call.

    Args:
        context: ZeroMQ's.
        hosts: The number of this host, and that of the other.
        address: Where this host can be reached.
        options: What the group is.

    Raises:
        StoreTimeout: The other did not say where it listens.
    """
    here, host = hosts
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = ":" in address
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.heartbeat_ivl = int(1000 * HEARTBEAT_S)
    socket.heartbeat_timeout = int(1000 * SILENCE_S)
    socket.maxmsgsize, socket.handshake_ivl = _LONGEST_MESSAGE, _HANDSHAKE_MS
    channel = Channel(host, socket, context.socket(zmq.PAIR), secrets.token_bytes(16))
    monitor = f"inproc://channel-{host}"
    socket.monitor(monitor, zmq.Event.DISCONNECTED)
    channel.monitor.connect(monitor)
    key = f"control/{min(host, here)}/{max(host, here)}"
    try:
        if here < host:
            _listen(channel, address, public, lambda contact: options.store.set(key, contact))
        else:
            options.store.wait([key], options.timeout)
            _call(channel, options.store.get(key))
    except BaseException:
        channel.close()  # ZeroMQ's context waits for it
        raise
    return channel


def _listen(channel: Channel, address: str, public: bytes, tell: Callable[[bytes], None]) -> None:
    channel.socket.curve_server = True
    listener = listen(resolve(address, 0, "this host's address"))
    channel.listener = listener.fd
    channel.socket.use_fd = listener.fd
    channel.socket.bind(listener.endpoint)
    tell(msgspec.msgpack.encode(_Contact(listener.endpoint, public, channel.token)))


def _call(channel: Channel, told: bytes) -> None:
    contact = msgspec.msgpack.decode(told, type=_Contact)
    channel.socket.ipv6 = "[" in contact.endpoint
    channel.socket.curve_serverkey = contact.public
    channel.socket.connect(contact.endpoint)
    channel.token = contact.token


class _Progress(Protocol):
    """How far this host's operations are."""

    begun: int

    @property
    def opened(self) -> int: ...


class Watch:
    """A leader's watch over the other hosts, and over its own. Threads: any.

    Args:
        comms: The group's sub-communicators.
        options: What the group is.
    """

    def __init__(self, comms: SubComms, options: BackendOptions) -> None:
        self._comms, self._options = comms, options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: list[Channel] = []
        self._wake, self._wakened = os.pipe()[::-1]
        os.set_blocking(self._wake, False)
        self._waking, self._released = threading.Lock(), False
        self._pids: dict[int, int] = {}
        self._progress: _Progress | None = None
        self._told = False
        self._asking = 0
        self._leaving = -1
        self._answered = threading.Condition()
        self._thread: threading.Thread | None = None

    # ---- connecting ------------------------------------------------------------------------------

    @classmethod
    def connect(cls, comms: SubComms, options: BackendOptions) -> Watch:
        """Open the channels to all other leaders; every leader calls.

        Raises:
            RendezvousTimeout: A leader cannot be reached.
        """
        watch = cls(comms, options)
        try:
            watch._connect()
        except BaseException:
            watch._release()
            raise
        return watch

    def _connect(self) -> None:
        comms = self._comms
        here, address = comms.here, outward_address(self._options.store)
        for host in range(comms.num_hosts):
            if host != here:
                self._channels.append(
                    open_channel(self._context, (here, host), address, self._options)
                )
        deadline = time.monotonic() + self._options.timeout.total_seconds()
        while not all(channel.known for channel in self._channels):
            for channel in self._channels:
                self._say(channel, ControlMessage())
                if channel.socket.poll(_LOOK_MS):
                    self._hear(channel)
            if time.monotonic() > deadline:
                silent = [channel.host for channel in self._channels if not channel.known]
                raise RendezvousTimeout(
                    "not all hosts can be reached",
                    missing=tuple(comms.hosts.ranks[h][0] for h in silent),
                    group=self._options.name,
                    rank=self._options.rank,
                    seen=", ".join(map(comms.hosts.describe, silent)),
                    fix="Check that the hosts can reach each other's ports.",
                )
        for channel in self._channels:
            channel.close_port()
        self._tell(ControlMessage())  # what was said before the other was there is lost

    def start(self, progress: _Progress) -> None:
        """Begin to watch."""
        self._progress = progress
        mine = self._comms.hosts.mine
        for place, rank in enumerate(mine):
            if rank != self._comms.hosts.rank:
                with contextlib.suppress(OSError):
                    self._pids[os.pidfd_open(self._comms.local.pid_of(place))] = place
        for channel in self._channels:
            channel.heard = time.monotonic()
        self._comms.state.listeners.append(self._nudge)
        self._thread = threading.Thread(target=self._serve, name="dure-watch", daemon=True)
        self._thread.start()

    def _nudge(self) -> None:
        with self._waking, contextlib.suppress(OSError):
            if not self._released:
                os.write(self._wake, b"x")

    # ---- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._watch()
        finally:
            self._release()

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        for channel in self._channels:
            poller.register(channel.socket, zmq.POLLIN)
            poller.register(channel.monitor, zmq.POLLIN)
        for pidfd in self._pids:
            poller.register(pidfd, zmq.POLLIN)
        next_heartbeat = 0.0
        while self._leaving < 0:
            ready = dict(poller.poll(_LOOK_MS))
            if self._wakened in ready:
                os.read(self._wakened, 64)
            for pidfd in [fd for fd in self._pids if fd in ready]:
                poller.unregister(pidfd)
                self._peer_exit(pidfd)
            for channel in self._channels:
                if channel.socket in ready:
                    self._hear(channel)
                if channel.monitor in ready and not channel.over:
                    self._broke(channel)
            now = time.monotonic()
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                self._tell(ControlMessage())
            self._examine(now)
        self._tell(ControlMessage(left=self._leaving))

    def _examine(self, now: float) -> None:
        """Look for silence, for leaders that left, and for what to tell."""
        state = self._comms.state
        for channel in self._channels:
            if not channel.over and now - channel.heard > SILENCE_S:
                channel.fell_silent = True
                self._lose(channel, f"nothing was heard from it for {SILENCE_S:g} s", 0)
            if 0 <= channel.left < self._begun:
                rank = self._comms.hosts.ranks[channel.host][0]
                state.settle(
                    AbortRecord(
                        kind="PeerLost",
                        what=f"rank {rank} left the group",
                        peer=rank,
                        host=self._comms.hosts.names[channel.host],
                        fix="Make a new group of the ranks that are left.",
                        after=channel.left,
                    )
                )
        record = state.look()
        if record is not None and not self._told:
            self._told = True
            self._tell(ControlMessage(record=record))
        if self._asking:
            self._asking, number = 0, self._asking
            self._tell(ControlMessage(asked=number))

    @property
    def _begun(self) -> int:
        return 0 if self._progress is None else self._progress.begun

    def _tell(self, message: ControlMessage) -> None:
        for channel in self._channels:
            if not channel.over:
                self._say(channel, message)

    def _say(self, channel: Channel, message: ControlMessage) -> None:
        message.begun = self._begun
        message.opened = 0 if self._progress is None else self._progress.opened
        channel.say(message)

    def _hear(self, channel: Channel) -> None:
        """Read all that came down a channel."""
        for message in channel.messages():
            channel.known, channel.heard = True, time.monotonic()
            with self._answered:
                channel.begun, channel.opened = message.begun, message.opened
                self._answered.notify_all()
            if message.asked:
                self._say(channel, ControlMessage())
                progress = self._progress
                if progress is not None and progress.begun >= message.asked > progress.opened:
                    self._comms.local.hurry()  # the group is broken; only we can tell by whom
            if message.record is not None:
                self._comms.state.settle(message.record)
            if message.left >= 0:
                channel.left, channel.over, channel.lost = message.left, True, time.monotonic()

    def _broke(self, channel: Channel) -> None:
        """A channel broke: see whether the other leader had said goodbye."""
        with contextlib.suppress(zmq.Again):
            read_event(channel.monitor, zmq.NOBLOCK)
        self._hear(channel)
        if not channel.over:
            # One that was silent was closed by our own side.
            channel.fell_silent = time.monotonic() - channel.heard >= SILENCE_S
            self._lose(channel, "the connection to it broke", self._begun)

    def _lose(self, channel: Channel, how: str, after: int) -> None:
        channel.over, channel.lost = True, time.monotonic()
        hosts, host = self._comms.hosts, channel.host
        self._comms.state.settle(
            AbortRecord(
                kind="PeerLost",
                what=f"{hosts.describe(host)} is lost",
                peer=hosts.ranks[host][0],
                host=hosts.names[host],
                seen=f"{how}, as rank {hosts.rank} noticed",
                fix="See the output of its ranks, and whether the network is whole; "
                "then make a new group of the ranks that are left.",
                after=after,
            ),
            patience_s=_END_S,
        )

    def _peer_exit(self, pidfd: int) -> None:
        """A process of this host ended: unless its rank had left, the group is broken."""
        place = self._pids.pop(pidfd)
        os.close(pidfd)
        comms = self._comms
        if comms.local.has_left(place) or comms.state.look() is not None:
            return
        rank, me = comms.hosts.mine[place], myself()
        pid = comms.local.pid_of(place)
        comms.state.settle(
            AbortRecord(
                kind="PeerLost",
                what=f"the process of rank {rank} ended",
                peer=rank,
                pid=pid,
                host=me.host,
                seen=f"pid {pid}, on {me.host}",
                fix="See that rank's own output; then make a new group of the ranks that are left.",
                after=comms.state.completed.of(place),
            )
        )

    # ---- questions and the end -------------------------------------------------------------------

    def absent(self, number: int) -> tuple[int, ...]:
        """Return the ranks of other hosts that have not come to operation `number`.

        A host that is in it, but not with all its ranks, finds out itself who is missing; there is
        a record then.
        """
        until = time.monotonic() + _ANSWER_S
        while True:
            late = [channel for channel in self._channels if channel.opened < number]
            if not late or time.monotonic() > until or self._comms.state.look() is not None:
                break
            with self._answered:
                self._asking = number
                self._nudge()
                self._answered.wait(_PAUSE_S)
        out: list[int] = []
        for channel in late:
            ranks = self._comms.hosts.ranks[channel.host]
            out.extend(ranks[1:] if channel.begun >= number else ranks[:1])
        return tuple(out)

    def lost_for_s(self, rank: int) -> float:
        """Return for how long the leader of a rank's host has been lost; 0 while it is not."""
        host, _ = self._comms.hosts.place_of(rank)
        since = [
            channel.lost
            for channel in self._channels
            if channel.host == host and channel.lost is not None
        ]
        return max(time.monotonic() - since[0], 1e-9) if since else 0.0

    def fell_silent(self, rank: int) -> bool:
        """Tell whether a rank's host was lost and may live: the link to it may be cut."""
        host, _ = self._comms.hosts.place_of(rank)
        return any(channel.host == host and channel.fell_silent for channel in self._channels)

    def stop(self, ended: int) -> None:
        """Say goodbye, after `ended` collectives."""
        self._leaving = ended
        self._nudge()
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_S)  # it closes what it uses, however long that takes

    def _release(self) -> None:
        """Close everything: on the thread that uses it, where there is one."""
        for channel in self._channels:
            channel.close()
        self._context.term()
        with self._waking:  # nobody must write to a descriptor that is somebody else's by then
            self._released = True
            for fd in (self._wake, self._wakened, *self._pids):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._pids = {}
