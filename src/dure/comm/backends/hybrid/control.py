"""Control channels: how a lost host, link or rank becomes one error on all ranks of a group.

**A channel** connects the leaders of two hosts: a ZeroMQ connection in addition to the engine's,
encrypted with CURVE keys that are made for the group and exchanged through its store; a process
without the listener's key cannot connect. The leader of the lower host listens.

**The watch.** A thread of each leader reads the channels, and checks whether a rank of its host
died or broke the group.

* A channel was closed. Either the other leader's process ended, and its kernel closed the
  connection; or its host or the link failed, and the kernel here closed the connection, because
  nothing was answered for `silence_s` (store/silence.py). No thread sends heartbeats: a leader
  whose interpreter is busy, or that is stopped, is not lost, and ranks that wait for it time out.
* A rank of this host died, or broke the group: the abort record is sent over all channels.
* A leader that leaves sends the number of collectives that it has completed. For a rank that is in
  a later one, or begins it, the leader is lost.

A leader that died did not send that number. Its last messages may have arrived nevertheless: so an
operation that has begun has half a second to complete.

Every message carries how many collectives the leader has begun, and how many its host has. A rank
that runs out of time requests them, to find out which ranks did not call.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.header import HeaderExchange
from dure.comm.backends.hybrid.subcomms import SubComms
from dure.errors import RendezvousTimeout
from dure.store.address import outward_address, resolve
from dure.store.listener import listen
from dure.store.monitored import MonitoredSocket
from dure.store.silence import silence_s

__all__ = ["SHOW_S", "ControlChannel", "ControlMessage", "HostWatch", "open_channel"]

SHOW_S = 3.0
"""How long ranks of a host that has lost its leader may take to show themselves in the store."""

_LINGER_MS = 100
_LONGEST_MESSAGE = 1 << 18
_LOOK_MS = 50
_ANSWER_S = 0.5
_PAUSE_S = 0.02
_END_S = 0.5
_GOODBYE_S = 2.0

_Context = zmq.Context[zmq.Socket[bytes]]


class ControlMessage(msgspec.Struct, array_like=True):
    """A message from one leader to another.

    `asked` is an operation that ran out of time, or 0; `left` is -1 unless the leader leaves.
    """

    begun: int = 0
    opened: int = 0
    asked: int = 0
    left: int = -1
    record: AbortRecord | None = None


class _Contact(msgspec.Struct, array_like=True):
    """The endpoint of a leader for one other leader."""

    endpoint: str
    public: bytes


@dataclass(slots=True, eq=False)
class ControlChannel:
    """A connection to the leader of `host`, and the last values received from it.

    Attributes:
        host: The other host.
        link: The connection; its monitor reports when it opens and when it breaks.
        endpoint: Where the listening one of the two leaders listens.
        is_open: Whether its handshake has succeeded.
        heard: Whether a message was received.
        begun: How many collectives the other leader has begun.
        opened: How many of them all ranks of its host have begun.
        left: How many it had completed when it left; -1 if it has not left.
        lost: When it was lost, or left; None if it is connected.
    """

    host: int
    link: MonitoredSocket
    endpoint: str = ""
    is_open: bool = False
    heard: bool = False
    begun: int = 0
    opened: int = 0
    left: int = -1
    lost: float | None = None

    @property
    def lost_for_s(self) -> float:
        """For how long it has been lost; 0 if it is not."""
        return 0.0 if self.lost is None else max(time.monotonic() - self.lost, 1e-9)

    def send(self, message: ControlMessage) -> None:
        """Send a message, if the channel is open; if it is not, the monitor reports that."""
        with contextlib.suppress(zmq.Again):
            self.link.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def messages(self) -> Iterator[ControlMessage]:
        """Read all messages that have arrived."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield msgspec.msgpack.decode(
                    self.link.socket.recv(zmq.NOBLOCK), type=ControlMessage
                )

    def close(self) -> None:
        """Close, after a moment for the last message."""
        self.link.close(_LINGER_MS if self.lost is None else 0)


def open_channel(
    context: _Context, here: int, host: int, address: str, options: BackendOptions
) -> ControlChannel:
    """Open the channel between two leaders; both call.

    Args:
        context: ZeroMQ's.
        here: The number of this host.
        host: That of the other.
        address: Of this host, for other hosts.
        options: Of the group.

    Raises:
        StoreTimeout: The other did not publish its endpoint.
    """
    events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
    link = MonitoredSocket(context, events, _LONGEST_MESSAGE)
    channel = ControlChannel(host, link)
    with link.closed_on_error():  # ZeroMQ's context waits for it
        public, link.socket.curve_secretkey = zmq.curve_keypair()
        link.socket.curve_publickey = public
        link.socket.handshake_ivl = 1000 * silence_s()
        key = f"control/{min(host, here)}/{max(host, here)}"
        if here < host:
            listener = listen(resolve(address, 0, "this host's address"))
            link.bind(listener.endpoint, listener.fd)
            contact = _Contact(listener.endpoint, public)
            options.store.set(key, msgspec.msgpack.encode(contact))
        else:
            options.store.wait([key], options.timeout)
            contact = msgspec.msgpack.decode(options.store.get(key), type=_Contact)
            link.socket.curve_serverkey = contact.public
            link.connect(contact.endpoint)
        channel.endpoint = contact.endpoint
    return channel


class HostWatch:
    """A leader's watch over the other hosts, and over its own. Threads: any.

    Args:
        comms: The group's sub-communicators.
        headers: The header exchange, which counts this host's operations.
        options: Of the group.

    Raises:
        RendezvousTimeout: A leader cannot be reached.

    Collective:
        Every leader makes one: it opens the channels to all others.
    """

    def __init__(self, comms: SubComms, headers: HeaderExchange, options: BackendOptions) -> None:
        self._comms, self._headers, self._options = comms, headers, options
        self._context = _Context()
        self._channels: list[ControlChannel] = []
        self._wake, self._wakened = os.pipe()[::-1]
        os.set_blocking(self._wake, False)
        self._waking, self._released = threading.Lock(), False
        self._sent_record = False
        self._asking = 0
        self._leaving = -1
        self._thread: threading.Thread | None = None
        try:
            self._connect()
        except BaseException:
            self._release()
            raise

    def _connect(self) -> None:
        comms, options = self._comms, self._options
        here, address = comms.hosts.here, outward_address(options.store)
        for host in range(len(comms.hosts.ranks)):
            if host != here:
                self._channels.append(open_channel(self._context, here, host, address, options))
        deadline = time.monotonic() + options.timeout.total_seconds()
        while silent := [channel for channel in self._channels if not channel.heard]:
            for channel in self._channels:
                channel.send(ControlMessage())
                if channel.link.socket.poll(_LOOK_MS):
                    self._receive(channel)
            if time.monotonic() > deadline:
                raise RendezvousTimeout(
                    "not all hosts can be reached",
                    missing=tuple(comms.hosts.ranks[channel.host][0] for channel in silent),
                    group=options.name,
                    rank=options.rank,
                    seen=", ".join(map(self._unconnected, silent)),
                    fix="Check for a firewall between the hosts, and that other hosts reach that "
                    "address; GLOO_SOCKET_IFNAME names another interface.",
                )
        self._broadcast(ControlMessage())  # messages sent before a leader had connected are lost

    def _unconnected(self, channel: ControlChannel) -> str:
        hosts = self._comms.hosts
        other, here = hosts.describe(channel.host), "this host"
        connects, listens = (other, here) if hosts.here < channel.host else (here, other)
        place = channel.endpoint.removeprefix("tcp://")
        return f"no connection from {connects} to {listens}, at {place}"

    def start(self) -> None:
        """Begin to watch."""
        self._comms.state.listeners.append(self._nudge)
        self._comms.absent = self._absent
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
            poller.register(channel.link.socket, zmq.POLLIN)
            poller.register(channel.link.monitor, zmq.POLLIN)
        while self._leaving < 0:
            ready = dict(poller.poll(_LOOK_MS))
            if self._wakened in ready:
                os.read(self._wakened, 64)
            for channel in self._channels:
                if channel.link.socket in ready:
                    self._receive(channel)
                if channel.link.monitor in ready:
                    self._note(channel)
            self._examine()
        self._broadcast(ControlMessage(left=self._leaving))

    def _examine(self) -> None:
        """Check for ranks that died or left, and for messages to send."""
        comms = self._comms
        for channel in self._channels:
            if 0 <= channel.left < self._headers.begun:
                rank = comms.hosts.ranks[channel.host][0]
                fix = "Make a new group of the ranks that are left."
                comms.state.lose(rank, f"rank {rank} left the group", channel.left, fix=fix)
        for place, rank in list(enumerate(comms.hosts.mine))[1:]:  # the first is this rank
            if comms.local.gone(place) and not comms.local.group.has_left(place):
                what, pid = f"the process of rank {rank} ended", comms.local.group.pid_of(place)
                seen = f"pid {pid}, on {comms.hosts.names[comms.hosts.here]}"
                after = comms.state.completed[place]
                comms.state.lose(rank, what, after, seen=seen, pid=pid)
        record = comms.state.look()
        if record is not None and not self._sent_record:
            self._sent_record = True
            self._broadcast(ControlMessage(record=record))
        if self._asking:
            self._asking, number = 0, self._asking
            self._broadcast(ControlMessage(asked=number))

    def _broadcast(self, message: ControlMessage) -> None:
        """Send a message, with this host's counts, to all leaders that are connected."""
        message.begun = self._headers.begun
        message.opened = self._headers.opened
        for channel in self._channels:
            if channel.lost is None:
                channel.send(message)

    def _receive(self, channel: ControlChannel) -> None:
        """Handle all messages that have arrived on a channel."""
        for message in channel.messages():
            channel.heard = True
            channel.begun, channel.opened = message.begun, message.opened
            if message.asked:
                self._broadcast(ControlMessage())
                headers = self._headers
                if headers.begun >= message.asked > headers.opened:
                    # Ranks of this host are missing: end its waits, whose timeouts name them.
                    self._comms.local.group.set_timeout(0.0)
            if message.record is not None:
                self._settle(message.record)
            if message.left >= 0:
                channel.left, channel.lost = message.left, time.monotonic()

    def _note(self, channel: ControlChannel) -> None:
        """Handle a channel that opened or broke; a leader that left had sent a message."""
        event = channel.link.event()
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            channel.is_open = True
        self._receive(channel)
        if event == zmq.Event.DISCONNECTED and channel.is_open and channel.lost is None:
            self._lose(channel)

    def _lose(self, channel: ControlChannel) -> None:
        channel.lost = time.monotonic()
        why = f"its process ended or its host did not answer for {silence_s()} s"
        seen = f"because {why}, as rank {self._comms.hosts.rank} noticed"
        self._lose_host(channel.host, self._headers.begun, seen)

    def _settle(self, record: AbortRecord) -> None:
        """Break the group by another leader's record.

        If the record's reporter lost the connection to this host, then the ranks here have lost the
        reporter's host.
        """
        hosts = self._comms.hosts
        if record.reporter is None or record.peer not in hosts.mine:
            self._comms.state.settle(record)
            return
        why = f"one of the two hosts did not answer the other for {silence_s()} s"
        seen = f"because {why}, as rank {record.reporter} noticed"
        self._lose_host(hosts.places[record.reporter][0], record.after, seen)

    def _lose_host(self, host: int, after: int, seen: str) -> None:
        hosts = self._comms.hosts
        self._comms.state.lose(
            hosts.ranks[host][0],
            f"{hosts.describe(host)} is lost",
            after,
            seen=f"the connection to it was closed, {seen}",
            fix="Check the output of its ranks, and the network; then make a new group of the "
            "ranks that are left.",
            reporter=hosts.rank,
            patience_s=_END_S,
        )

    # ---- questions and the end -------------------------------------------------------------------

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks of other hosts that have not begun the operation that this rank is in.

        A host that has begun it with some of its ranks finds the missing ranks itself, and sends a
        record.
        """
        number, until = self._headers.begun, time.monotonic() + _ANSWER_S
        while late := [channel for channel in self._channels if channel.opened < number]:
            if time.monotonic() > until or self._comms.state.look() is not None:
                break
            self._asking = number
            self._nudge()
            time.sleep(_PAUSE_S)
        out: list[int] = []
        for channel in late:
            ranks = self._comms.hosts.ranks[channel.host]
            out.extend(ranks[1:] if channel.begun >= number else ranks[:1])
        return tuple(out)

    def channel_to(self, rank: int) -> ControlChannel | None:
        """Return the channel to the host of `rank`; None for this one's."""
        host, _ = self._comms.hosts.places[rank]
        return next((channel for channel in self._channels if channel.host == host), None)

    def stop(self, ended: int) -> None:
        """Send that this leader leaves after `ended` collectives; end the thread."""
        self._leaving = ended
        self._nudge()
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_S)  # it closes its sockets, even if that takes longer

    def _release(self) -> None:
        """Close everything; called on the thread that uses it, if there is one."""
        for channel in self._channels:
            channel.close()
        self._context.term()
        with self._waking:  # a closed descriptor may get another use
            self._released = True
            os.close(self._wake)
            os.close(self._wakened)
