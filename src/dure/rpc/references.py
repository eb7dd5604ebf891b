"""Who holds which remote reference: the protocol, without I/O (events in, actions out).

Each process of a job feeds its own `References` with what happens there, and does what comes back.
Whoever made a value *owns* it and keeps it until nobody holds a reference to it.

    user                          owner
     | Hold -------------------->   |      the user is a holder from here on
     |   <-------------------- Held |
     | Drop -------------------->   |      and here no more

**One hold.** A process holds a reference once, however many objects in it refer to the value. The
owner keeps, for each value, the set of processes that hold it.

**Tokens.** A reference may be sent to any process by any process that has it. The sender keeps its
own hold until the receiver has one: it packs a *token* into the message, and the receiver answers
`Accepted` when its own hold stands at the owner, at once where it stands already. `remote` makes
the caller a holder with the call itself: the reference is the call's token, which ends with `Held`.
A reference may be passed on before the call that makes the value has arrived: the owner keeps
its entry from whatever speaks of it first.

**Calls that may not have arrived.** Calls are never resent. When a connection breaks, the sender
asks about the tokens of the calls that were under way (`Unsure`). The receiver answers `Declined`
for those that it never saw, and refuses them if they come after all.

**Deaths.** What a dead process owned is lost. What it held, or was being sent, could have been
passed on: some third process may have the reference from it, and its `Hold` may be on its way. So
whoever has a holder that died, or a token to it, keeps both in *limbo*, and asks all others
(`AskFlush`). They answer `Flushed` once they know of the death, have read all that came from the
dead process, and hold at the owners what it passed on to them. If one of those asked dies too, the
others are asked about that one as well; limbo ends for all its dead at once.

**Fetching.** A value is fetched by its holders, and by who makes it before the call has arrived. An
owner refuses others: they have guessed the reference, or dropped it.

**What is relied upon.** Messages of this protocol from one process to another arrive in their
order, once, while both live (`links`). A death is final: nothing that came from a dead process is
fed after `died`. All processes are known (`joined`) before anything is heard of them.

Threads: the caller's lock guards all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

__all__ = [
    "Accepted",
    "Action",
    "AskFlush",
    "Declined",
    "Drop",
    "Flushed",
    "Freed",
    "Gone",
    "Held",
    "Hold",
    "Lost",
    "Message",
    "RefId",
    "References",
    "Send",
    "Token",
    "Unsure",
]

RefId = tuple[int, int]
"""Of a reference: the process that made it, and a number of that process."""

Token = tuple[int, int]
"""Of a reference under way: the process that sent it, and a number of that process."""


# --- messages -------------------------------------------------------------------------------------


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To the owner: the sender holds this reference from now on."""

    ref: RefId


class Held(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From the owner: the hold stands."""

    ref: RefId


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """To the owner: the sender holds the reference no more."""

    ref: RefId


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """From the owner: there is no such value, and never will be."""

    ref: RefId


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To the one who sent a reference: the receiver has its own hold."""

    token: Token


class Unsure(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The connection broke: have the calls with these tokens arrived?"""

    tokens: tuple[Token, ...]


class Declined(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """These have not, and never will, or were settled before."""

    tokens: tuple[Token, ...]


class AskFlush(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Has all that came from `dead` been read, and is held at its owners?"""

    dead: int


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """It has."""

    dead: int


Message = Hold | Held | Drop | Gone | Accepted | Unsure | Declined | AskFlush | Flushed


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, in order and for certain, as long as `to` lives."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Freed:
    """Nobody holds this value any more: let go of it."""

    ref: RefId


@dataclass(frozen=True, slots=True)
class Lost:
    """The value of this reference is gone: its owner died, or never made it."""

    ref: RefId


Action = Send | Freed | Lost


# --- the state ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """A reference that this process has, or whose value it keeps for others."""

    owner: int
    local: int = 0  # objects, and messages read but not unpacked, that refer to it here
    tokens: set[Token] = field(default_factory=set[Token])  # of messages to others
    held: bool = True  # whether the owner knows of it: has said so, or is this process
    waiting: list[tuple[int, Token]] = field(default_factory=list[tuple[int, Token]])
    """Who sent it here, and waits for this process's own hold."""
    # Of a value of this process:
    made: bool = True  # False: a message overtook the call that makes it
    holders: set[int] = field(default_factory=set[int])  # other processes


@dataclass(slots=True)
class _Sent:
    """A reference under way."""

    ref: RefId
    to: int
    makes: bool  # with the call that makes the value


class References:
    """All references of one process.

    Args:
        me: The process; others are known by other numbers, never used again.

    Cost:
        One to three small messages for each process that a reference comes to, one when it goes.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self._entries: dict[RefId, _Entry] = {}
        self._sent: dict[Token, _Sent] = {}
        self._refused: set[Token] = set()  # declined: not to be taken if they come late
        self._peers: set[int] = set()
        self._dead: set[int] = set()
        self._limbo: set[int] = set()  # dead processes whose holds and tokens still count
        self._awaited: set[tuple[int, int]] = set()  # whose answers about whom limbo waits for
        self._asked: set[tuple[int, int]] = set()  # who asks us about whom, and has no answer yet
        self._number = 0
        self._actions: list[Action] = []

    # --- what a program does ---------------------------------------------------------------

    def own(self) -> RefId:
        """Begin a value of this process, with one object that refers to it."""
        ref = self._next()
        self._entries[ref] = _Entry(self.me, local=1)
        return ref

    def create(self, owner: int) -> RefId:
        """Begin a reference to a value that a call makes at `owner`; it is the call's token."""
        ref = self._next()
        self._entries[ref] = _Entry(owner, local=1, tokens={ref}, held=False)
        self._sent[ref] = _Sent(ref, owner, makes=True)
        return ref

    def pack(self, ref: RefId, to: int) -> tuple[int, Token]:
        """Put a reference into a message to `to`; return its owner, and the token to go along.

        Raises:
            KeyError: It is lost.
        """
        entry, token = self._entries[ref], self._next()
        entry.tokens.add(token)
        self._sent[token] = _Sent(ref, to, makes=False)
        return entry.owner, token

    def dropped(self, ref: RefId) -> list[Action]:
        """Take note that an object, or a message that was read and not unpacked, is gone."""
        if ref in self._entries:
            self._entries[ref].local -= 1
            self._settle(ref)
        return self._take()

    def not_sent(self, tokens: Iterable[Token]) -> list[Action]:
        """Take back what was packed into a message that was never sent."""
        self._take_back(tokens)
        return self._take()

    # --- what messages say -----------------------------------------------------------------

    def made(self, ref: RefId, sender: int) -> tuple[bool, list[Action]]:
        """Take a call that makes a value here; False: it was given up, and must not run.

        A process names the values that it has made here; those of another one are not its to make.
        """
        if sender in self._dead or ref in self._refused or ref[0] != sender:
            return False, []
        entry = self._entries.setdefault(ref, _Entry(self.me))
        entry.made = True
        entry.holders.add(sender)
        self._send(sender, Held(ref))
        return True, self._take()

    def arrived(
        self, ref: RefId, owner: int, sender: int, token: Token
    ) -> tuple[bool, list[Action]]:
        """Take a reference out of a message, before anybody unpacks it; False: it is lost.

        It counts as one object, until `dropped`.
        """
        if token in self._refused or owner in self._dead or sender in self._dead:
            return False, []
        if owner == self.me:
            entry = self._find_own(ref)
        elif ref in self._entries:
            entry = self._entries[ref]
        else:
            entry = self._entries[ref] = _Entry(owner, held=False)
            self._send(owner, Hold(ref))
        if entry is not None:
            entry.local += 1
        if entry is None or entry.held:
            self._send(sender, Accepted(token))
        else:
            entry.waiting.append((sender, token))
        return entry is not None, self._take()

    def expect(self, ref: RefId, sender: int) -> bool:
        """Whether a value of this process that a process asks for is there, or may come.

        It must hold the reference, or be about to make the value. All that it has sent before it
        asked was heard (`Envelope.after`), so that a hold which is not known is none.
        """
        entry = self._find_own(ref) if sender == ref[0] else self._entries.get(ref)
        if entry is None or entry.owner != self.me:
            return False
        return sender in entry.holders or sender == self.me or (sender == ref[0] and not entry.made)

    def heard(self, sender: int, message: Message) -> list[Action]:
        """Take a message of this protocol."""
        if sender not in self._dead:
            self._hear(sender, message)
        return self._take()

    def unsure(self, to: int) -> list[Action]:
        """Ask about the calls that were under way to a process when the connection broke."""
        asked = tuple([token for token, sent in self._sent.items() if sent.to == to])
        if asked:
            self._send(to, Unsure(asked))
        return self._take()

    # --- who is there ----------------------------------------------------------------------

    def joined(self, peer: int) -> list[Action]:
        """Take note of another process."""
        if peer not in self._peers | self._dead | {self.me}:
            self._peers.add(peer)
            for dead in self._limbo:
                self._ask(peer, dead)
        return self._take()

    def died(self, peer: int) -> list[Action]:
        """Take note that a process is gone for good; all that came from it was fed before."""
        if peer in self._dead:
            return []
        self._peers.discard(peer)
        self._dead.add(peer)
        self._refused = {token for token in self._refused if token[0] != peer}
        for ref, entry in list(self._entries.items()):
            if entry.owner == peer or (ref[0] == peer and not entry.made):
                self._lose(ref)
        self._asked = {(by, dead) for by, dead in self._asked if by != peer}
        self._awaited = {(by, dead) for by, dead in self._awaited if by != peer}
        if (
            self._limbo
            or any(peer in entry.holders for entry in self._entries.values())
            or any(sent.to == peer for sent in self._sent.values())
        ):
            self._limbo.add(peer)
            for other in self._peers:
                self._ask(other, peer)
        self._leave_limbo()
        return self._take()

    # --- what people see -------------------------------------------------------------------

    def has(self, ref: RefId) -> bool:
        """Whether a reference is known here and not lost."""
        return ref in self._entries

    def is_held(self, ref: RefId) -> bool:
        """Whether a value stays: its owner knows of this hold, or who sent it keeps it."""
        entry = self._entries.get(ref)
        return entry is not None and (entry.held or bool(entry.waiting))

    def holders(self) -> dict[RefId, tuple[int, ...]]:
        """Return which other processes hold each value of this one."""
        own = [(ref, entry) for ref, entry in self._entries.items() if entry.owner == self.me]
        return {ref: tuple(sorted(entry.holders)) for ref, entry in own}

    def users(self) -> dict[RefId, int]:
        """Return the owner of each value that this process holds."""
        entries = self._entries.items()
        return {ref: entry.owner for ref, entry in entries if entry.owner != self.me}

    @property
    def num_unsettled(self) -> int:
        """How many holds and tokens await an answer."""
        return len(self._sent) + sum(not entry.held for entry in self._entries.values())

    # --- steps -----------------------------------------------------------------------------

    def _next(self) -> tuple[int, int]:
        self._number += 1
        return self.me, self._number

    def _take(self) -> list[Action]:
        self._answer()
        actions, self._actions = self._actions, []
        return actions

    def _send(self, to: int, message: Message) -> None:
        if to == self.me:
            self._hear(to, message)
        elif to not in self._dead:
            self._actions.append(Send(to, message))

    def _hear(self, sender: int, message: Message) -> None:
        match message:
            case Hold(ref):
                entry = self._find_own(ref)
                if entry is not None:
                    entry.holders.add(sender)
                self._send(sender, Gone(ref) if entry is None else Held(ref))
            case Held(ref):
                self._hold_stands(ref)
            case Drop(ref):
                if ref in self._entries:
                    self._entries[ref].holders.discard(sender)
                    self._settle(ref)
            case Gone(ref):
                self._lose(ref)
            case Accepted(token):
                self._end(token)
            case Unsure(tokens):
                self._decline(sender, tokens)
            case Declined(tokens):
                self._take_back(tokens)
            case AskFlush(dead):
                self._asked.add((sender, dead))
            case Flushed(dead):
                self._awaited.discard((sender, dead))
                self._leave_limbo()

    def _find_own(self, ref: RefId) -> _Entry | None:
        """Return a value of this process, also if the call that makes it may be on its way."""
        coming = ref[0] != self.me and ref[0] not in self._dead and ref not in self._refused
        if ref not in self._entries and coming:
            self._entries[ref] = _Entry(self.me, made=False)
        return self._entries.get(ref)

    def _hold_stands(self, ref: RefId) -> None:
        entry = self._entries.get(ref)
        if entry is None:
            return
        entry.held = True
        for token in [token for token in entry.tokens if self._sent[token].makes]:
            self._end(token)
        waiting, entry.waiting = entry.waiting, []
        for sender, token in waiting:
            self._send(sender, Accepted(token))
        self._settle(ref)

    def _decline(self, sender: int, tokens: Iterable[Token]) -> None:
        """Answer about calls that may have been lost; those that were are refused from now on."""
        expected = {token for entry in self._entries.values() for _, token in entry.waiting}
        declined = tuple([token for token in tokens if token not in expected])
        self._refused.update(declined)
        for ref in declined:
            if ref in self._entries and not self._entries[ref].made:
                self._lose(ref)
        self._send(sender, Declined(declined))

    def _end(self, token: Token) -> None:
        """Keep a reference no longer for the sake of one message."""
        sent = self._sent.pop(token, None)
        if sent is not None and sent.ref in self._entries:
            self._entries[sent.ref].tokens.discard(token)
            self._settle(sent.ref)

    def _take_back(self, tokens: Iterable[Token]) -> None:
        """Deal with tokens that nobody has received."""
        for token in tokens:
            sent = self._sent.get(token)
            if sent is not None and sent.makes:
                self._lose(sent.ref)
            self._end(token)

    def _settle(self, ref: RefId) -> None:
        """Let go of a reference that nothing needs here."""
        entry = self._entries.get(ref)
        if entry is None or entry.local > 0 or entry.tokens or entry.holders or not entry.held:
            return
        del self._entries[ref]
        if entry.owner == self.me:
            self._actions.append(Freed(ref))
        else:
            self._send(entry.owner, Drop(ref))

    def _lose(self, ref: RefId) -> None:
        """Give up a reference whose value is gone, or was never made."""
        entry = self._entries.pop(ref, None)
        if entry is None:
            return
        for token in entry.tokens:
            self._sent.pop(token, None)
        for sender, token in entry.waiting:  # which has lost it as well, or will
            self._send(sender, Accepted(token))
        self._actions.append(Lost(ref))
        for holder in sorted(entry.holders):
            self._send(holder, Gone(ref))

    def _ask(self, other: int, dead: int) -> None:
        self._awaited.add((other, dead))
        self._send(other, AskFlush(dead))

    def _answer(self) -> None:
        """Answer those who ask about the dead, as far as all of theirs is held."""
        if not self._asked:
            return
        pending = {sender for entry in self._entries.values() for sender, _ in entry.waiting}
        ready = {(by, dead) for by, dead in self._asked if dead in self._dead - pending}
        self._asked -= ready
        for by, dead in sorted(ready):
            self._send(by, Flushed(dead))

    def _leave_limbo(self) -> None:
        """If all answers are there, let go of what the dead held, and of what was sent to them."""
        if self._awaited or not self._limbo:
            return
        gone, self._limbo = self._limbo, set[int]()
        for token in [token for token, sent in self._sent.items() if sent.to in gone]:
            self._end(token)
        for ref, entry in list(self._entries.items()):
            entry.holders -= gone
            self._settle(ref)
