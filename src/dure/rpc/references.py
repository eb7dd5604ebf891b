"""The protocol of remote references, without I/O (events in, actions out).

Each process of a job feeds its own `References` with events, and performs the actions that it
returns. The process that has a value *owns* it, and keeps it until no process holds a reference.

     user                          owner
     | Hold -------------------->   |      the user is a holder from here on
     |   <-------------------- Held |
     | Drop -------------------->   |      and here no more

**One hold.** A process holds a reference once, however many of its objects refer to the value. The
owner records, for each value, the set of processes that hold it.

**Tokens.** Any process that has a reference may send it to any other. The sender keeps its own hold
until the receiver has one: it packs a *token* into the message, and the receiver answers
`TokenAccepted` when the owner has confirmed the receiver's hold, or at once if it had one. `remote`
makes the caller a holder with the call itself: the reference is the call's token, which ends with
`Held`. A reference may be passed on before the call that makes the value has arrived: the owner
creates its entry with the first message about it.

**Calls that may not have arrived.** Calls are never resent. When a connection breaks, the sender
asks about the tokens of the calls that were under way (`Unsure`). The receiver answers `Declined`
for calls that it never received, and refuses them if they arrive later.

**Deaths.** Values of a dead process are lost. References that it held, or that were being sent to
it, could have been passed on: some third process may have the reference from it, and its `Hold` may
be on its way. So a process that has a dead holder, or a token to it, keeps both in *limbo*, and
asks all others (`AskFlush`). They answer `Flushed` when they know of the death, have read all
messages of the dead process, and hold at the owners what it passed on to them. If a process that
was asked dies too, the others are asked about it as well; limbo ends for all dead processes at
once.

**Fetching.** A value is fetched by its holders, and by the process that makes it before the call
has arrived. An owner refuses others.

**Forged messages.** The numbers of references and tokens are partly random: only processes that
were sent one know it. A message that ends or loses something counts only if it comes from the
process that may send it: the owner, or the process that the token was sent to.

**Assumptions.** Messages of this protocol from one process to another arrive in order, once, while
both live (`links`). A death is final: no event of a dead process follows `died`. All processes are
announced (`joined`) before any other event about them.

Threads: the caller's lock guards the state.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

__all__ = [
    "SEQUENCE_BITS",
    "Action",
    "AskFlush",
    "Declined",
    "Drop",
    "Flushed",
    "Freed",
    "Held",
    "Hold",
    "Message",
    "RefId",
    "ReferenceLost",
    "References",
    "Send",
    "Token",
    "TokenAccepted",
    "Unsure",
    "ValueGone",
]

RefId = tuple[int, int]
"""A reference: the process that made it, and a number that other processes cannot guess."""

Token = tuple[int, int]
"""A reference under way: the process that sent it, and a number as of a reference."""

SEQUENCE_BITS = 24
"""The low bits of a number count; the others are random."""


# --- messages -------------------------------------------------------------------------------------


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To the owner: the sender holds this reference from now on."""

    ref: RefId


class Held(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From the owner: the hold is confirmed."""

    ref: RefId


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """To the owner: the sender no longer holds the reference."""

    ref: RefId


class ValueGone(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """From the owner: the value does not exist, and never will."""

    ref: RefId


class TokenAccepted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To the sender of a reference: the receiver has its own hold."""

    token: Token


class Unsure(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The connection broke: have the calls with these tokens arrived?"""

    tokens: tuple[Token, ...]


class Declined(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """These calls have not arrived and will be refused, or were settled before."""

    tokens: tuple[Token, ...]


class AskFlush(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Were all messages of `dead` read, and are the references in them held at their owners?"""

    dead: int


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Yes, they were."""

    dead: int


Message = Hold | Held | Drop | ValueGone | TokenAccepted | Unsure | Declined | AskFlush | Flushed


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message reliably and in order, as long as `to` lives."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Freed:
    """No process holds this value anymore: free it."""

    ref: RefId


@dataclass(frozen=True, slots=True)
class ReferenceLost:
    """The value of this reference is gone: its owner died, or never made it."""

    ref: RefId


Action = Send | Freed | ReferenceLost


# --- the state ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ReferenceState:
    """A reference that this process has, or whose value it keeps for others."""

    owner: int
    local: int = 0  # objects, and messages read but not unpacked, that refer to it here
    tokens: set[Token] = field(default_factory=set[Token])  # of messages to others
    held: bool = True  # whether the owner has confirmed the hold, or is this process
    waiting: list[tuple[int, Token]] = field(default_factory=list[tuple[int, Token]])
    """Processes that sent it here, and wait for this process's own hold."""
    # If this process is the owner:
    made: bool = True  # False while the call that makes it has not arrived
    holders: set[int] = field(default_factory=set[int])  # other processes


@dataclass(slots=True)
class _SentToken:
    """A reference under way."""

    ref: RefId
    to: int
    makes: bool  # with the call that makes the value


def _unguessable_numbers() -> Callable[[], int]:
    sequence = itertools.count(1)
    return lambda: secrets.randbits(39) << SEQUENCE_BITS | next(sequence) % (1 << SEQUENCE_BITS)


class References:
    """All references of one process.

    Args:
        me: The process; ids of processes are never reused.
        new_number: Returns numbers for references and tokens that others cannot guess.

    Cost:
        One to three small messages for each process that receives a reference, one when it drops
        it.
    """

    def __init__(self, me: int, new_number: Callable[[], int] | None = None) -> None:
        self.me, self._new_number = me, new_number or _unguessable_numbers()
        self._entries: dict[RefId, _ReferenceState] = {}
        self._sent: dict[Token, _SentToken] = {}
        self._refused: set[Token] = set()  # declined: refused if they arrive later
        self._peers: set[int] = set()
        self._dead: set[int] = set()
        self._limbo: set[int] = set()  # dead processes whose holds and tokens still count
        self._awaited: set[tuple[int, int]] = set()  # (process asked, dead): limbo waits for it
        self._asked: set[tuple[int, int]] = set()  # (process that asks, dead): not answered yet
        self._actions: list[Action] = []

    # --- what a program does ---------------------------------------------------------------

    def own(self) -> RefId:
        """Create a value of this process, with one object that refers to it."""
        ref = self._next()
        self._entries[ref] = _ReferenceState(self.me, local=1)
        return ref

    def create(self, owner: int) -> RefId:
        """Create a reference to a value that a call makes at `owner`; it is the call's token."""
        ref = self._next()
        self._entries[ref] = _ReferenceState(owner, local=1, tokens={ref}, held=False)
        self._sent[ref] = _SentToken(ref, owner, makes=True)
        return ref

    def pack(self, ref: RefId, to: int) -> tuple[int, Token]:
        """Put a reference into a message to `to`; return its owner, and the token to send with it.

        Raises:
            KeyError: It is lost.
        """
        entry, token = self._entries[ref], self._next()
        entry.tokens.add(token)
        self._sent[token] = _SentToken(ref, to, makes=False)
        return entry.owner, token

    def dropped(self, ref: RefId) -> list[Action]:
        """Handle that an object, or a message that was read and not unpacked, was freed."""
        if ref in self._entries:
            self._entries[ref].local -= 1
            self._settle(ref)
        return self._take()

    def not_sent(self, tokens: Iterable[Token]) -> list[Action]:
        """Take back tokens of a message that was never sent."""
        self._take_back(tokens)
        return self._take()

    # --- messages --------------------------------------------------------------------------

    def made(self, ref: RefId, sender: int) -> tuple[bool, list[Action]]:
        """Handle a call that makes a value here; False if it was given up, and must not run.

        A call makes only references that its sender has created.
        """
        if sender in self._dead or ref in self._refused or ref[0] != sender:
            return False, []
        entry = self._entries.setdefault(ref, _ReferenceState(self.me))
        entry.made = True
        entry.holders.add(sender)
        self._send(sender, Held(ref))
        return True, self._take()

    def arrived(
        self, ref: RefId, owner: int, sender: int, token: Token
    ) -> tuple[bool, list[Action]]:
        """Handle a reference in a message, before it is unpacked; False if it is lost.

        It counts as one object, until `dropped`.
        """
        if token in self._refused or owner in self._dead or sender in self._dead:
            return False, []
        if owner == self.me:
            entry = self._find_own(ref)
        elif ref in self._entries:
            entry = self._entries[ref]
        else:
            entry = self._entries[ref] = _ReferenceState(owner, held=False)
            self._send(owner, Hold(ref))
        if entry is not None:
            entry.local += 1
        if entry is None or entry.held:
            self._send(sender, TokenAccepted(token))
        else:
            entry.waiting.append((sender, token))
        return entry is not None, self._take()

    def expect(self, ref: RefId, sender: int) -> bool:
        """Whether a process may fetch a value of this one, which is made or may be made.

        It must hold the reference, or be about to make the value. All reliable messages that it
        sent before were handled (`RpcMessage.after`), so an unknown hold does not exist.
        """
        entry = self._find_own(ref) if sender == ref[0] else self._entries.get(ref)
        if entry is None or entry.owner != self.me:
            return False
        return sender in entry.holders or sender == self.me or (sender == ref[0] and not entry.made)

    def heard(self, sender: int, message: Message) -> list[Action]:
        """Handle a message of this protocol."""
        if sender not in self._dead:
            self._hear(sender, message)
        return self._take()

    def unsure(self, to: int) -> list[Action]:
        """Ask about the calls that were under way to a process when the connection broke."""
        asked = tuple([token for token, sent in self._sent.items() if sent.to == to])
        if asked:
            self._send(to, Unsure(asked))
        return self._take()

    # --- processes -------------------------------------------------------------------------

    def joined(self, peer: int) -> list[Action]:
        """Handle that another process has joined."""
        if peer not in self._peers | self._dead | {self.me}:
            self._peers.add(peer)
            for dead in self._limbo:
                self._ask(peer, dead)
        return self._take()

    def died(self, peer: int) -> list[Action]:
        """Handle that a process is gone for good; all events of it came before."""
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

    # --- queries ---------------------------------------------------------------------------

    def has(self, ref: RefId) -> bool:
        """Whether a reference is known here and not lost."""
        return ref in self._entries

    def is_held(self, ref: RefId) -> bool:
        """Whether a value stays: its owner knows of this hold, or the sender keeps its own."""
        entry = self._entries.get(ref)
        return entry is not None and (entry.held or bool(entry.waiting))

    def holders(self) -> dict[RefId, tuple[int, ...]]:
        """Return the other processes that hold each value of this one."""
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
        return self.me, self._new_number()

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
                self._send(sender, ValueGone(ref) if entry is None else Held(ref))
            case Held(ref) if self._is_of(ref, sender):
                self._confirm_hold(ref)
            case Drop(ref):
                if ref in self._entries:
                    self._entries[ref].holders.discard(sender)
                    self._settle(ref)
            case ValueGone(ref) if self._is_of(ref, sender):
                self._lose(ref)
            case TokenAccepted(token) if self._was_sent(token, sender):
                self._end(token)
            case Unsure(tokens):
                self._decline(sender, tokens)
            case Declined(tokens):
                self._take_back([token for token in tokens if self._was_sent(token, sender)])
            case AskFlush(dead):
                self._asked.add((sender, dead))
            case Flushed(dead):
                self._awaited.discard((sender, dead))
                self._leave_limbo()
            case _:  # forged
                pass

    def _is_of(self, ref: RefId, owner: int) -> bool:
        entry = self._entries.get(ref)
        return entry is not None and entry.owner == owner

    def _was_sent(self, token: Token, to: int) -> bool:
        sent = self._sent.get(token)
        return sent is not None and sent.to == to

    def _find_own(self, ref: RefId) -> _ReferenceState | None:
        """Return a value of this process, also if the call that makes it may not have arrived."""
        coming = ref[0] != self.me and ref[0] not in self._dead and ref not in self._refused
        if ref not in self._entries and coming:
            self._entries[ref] = _ReferenceState(self.me, made=False)
        return self._entries.get(ref)

    def _confirm_hold(self, ref: RefId) -> None:
        entry = self._entries.get(ref)
        if entry is None:
            return
        entry.held = True
        for token in [token for token in entry.tokens if self._sent[token].makes]:
            self._end(token)
        waiting, entry.waiting = entry.waiting, []
        for sender, token in waiting:
            self._send(sender, TokenAccepted(token))
        self._settle(ref)

    def _decline(self, sender: int, tokens: Iterable[Token]) -> None:
        """Answer about calls that may be lost; those that are will be refused."""
        expected = {token for entry in self._entries.values() for _, token in entry.waiting}
        declined = tuple([token for token in tokens if token not in expected])
        self._refused.update(declined)
        for ref in declined:
            if ref in self._entries and not self._entries[ref].made:
                self._lose(ref)
        self._send(sender, Declined(declined))

    def _end(self, token: Token) -> None:
        """No longer keep a reference for one message."""
        sent = self._sent.pop(token, None)
        if sent is not None and sent.ref in self._entries:
            self._entries[sent.ref].tokens.discard(token)
            self._settle(sent.ref)

    def _take_back(self, tokens: Iterable[Token]) -> None:
        """Handle tokens that were not received."""
        for token in tokens:
            sent = self._sent.get(token)
            if sent is not None and sent.makes:
                self._lose(sent.ref)
            self._end(token)

    def _settle(self, ref: RefId) -> None:
        """Drop a reference that is not needed here anymore."""
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
        for sender, token in entry.waiting:  # they have lost it as well, or will
            self._send(sender, TokenAccepted(token))
        self._actions.append(ReferenceLost(ref))
        for holder in sorted(entry.holders):
            self._send(holder, ValueGone(ref))

    def _ask(self, other: int, dead: int) -> None:
        self._awaited.add((other, dead))
        self._send(other, AskFlush(dead))

    def _answer(self) -> None:
        """Answer questions about dead processes whose references are all held."""
        if not self._asked:
            return
        pending = {sender for entry in self._entries.values() for sender, _ in entry.waiting}
        ready = {(by, dead) for by, dead in self._asked if dead in self._dead - pending}
        self._asked -= ready
        for by, dead in sorted(ready):
            self._send(by, Flushed(dead))

    def _leave_limbo(self) -> None:
        """When all answers have arrived, end the holds of dead processes and the tokens to them."""
        if self._awaited or not self._limbo:
            return
        gone, self._limbo = self._limbo, set[int]()
        for token in [token for token, sent in self._sent.items() if sent.to in gone]:
            self._end(token)
        for ref, entry in list(self._entries.items()):
            entry.holders -= gone
            self._settle(ref)
