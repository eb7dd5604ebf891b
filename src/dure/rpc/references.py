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
makes the caller a holder with the call itself, and the owner sends `Held` when the call has ended,
so that one message says both. A reference may be passed on before
the call that makes the value has arrived: the owner creates its entry with the first message about
it.

**Deaths.** Values of a dead process are lost. Its holds end, and so do tokens to it. If it had
passed a reference on, and no other process holds the value, the value may be freed before the
receiver's `Hold` arrives: that is answered with `ValueGone`. So an owner remembers the references
of values that it has freed, the last `_KEPT` of them.

**Forged messages.** The numbers of references and tokens are partly random: only processes that
were sent one know it, and may hold and fetch the value. A message that ends or loses something
counts only if it comes from the process that may send it: the owner, or the process that the token
was sent to.

**Assumptions.** Messages of this protocol from one process to another arrive in order, once, while
both live (`directory`). A death is final: no event of a dead process follows `died`.

Threads:
    The caller's lock guards the state.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Callable, Iterable

import msgspec

__all__ = [
    "SEQUENCE_BITS",
    "Action",
    "Drop",
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
    "ValueGone",
]

RefId = tuple[int, int]
"""A reference: the process that made it, and a number that other processes cannot guess."""

Token = tuple[int, int]
"""A reference under way: the process that sent it, and a number as of a reference."""

SEQUENCE_BITS = 24
"""The low bits of a number count; the others are random."""

_RANDOM_PARTS = 64

_KEPT = 10_000
"""How many freed values an owner remembers, for references that arrive late."""


# --- messages -------------------------------------------------------------------------------------


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To the owner: the sender holds this reference from now on."""

    ref: RefId


class Held(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From the owner: the hold is confirmed; to who made the reference: the call has ended, too."""

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


Message = Hold | Held | Drop | ValueGone | TokenAccepted


# --- actions --------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send a message reliably and in order, as long as `to` lives."""

    to: int
    message: Message


class Freed(msgspec.Struct, frozen=True):
    """No process holds this value anymore: free it."""

    ref: RefId


class ReferenceLost(msgspec.Struct, frozen=True):
    """The value of this reference is gone: its owner died, or never made it."""

    ref: RefId


Action = Send | Freed | ReferenceLost


# --- the state ------------------------------------------------------------------------------------


class _ReferenceState(msgspec.Struct, eq=False):
    """A reference that this process has, or whose value it keeps for others."""

    owner: int
    local: int = 0  # objects, and messages read but not unpacked, that refer to it here
    tokens: set[Token] = set()  # of messages to others (a struct copies the default)
    held: bool = True  # whether the owner has confirmed the hold, or is this process
    waiting: list[tuple[int, Token]] = []
    """Processes that sent it here, and wait for this process's own hold."""
    # If this process is the owner:
    made: bool = True  # False while the call that makes it has not arrived
    holders: set[int] = set()  # other processes


class _SentToken(msgspec.Struct, eq=False):
    """A reference under way."""

    ref: RefId
    to: int


def _unguessable_numbers() -> Callable[[], int]:
    """Return a function that returns numbers; it asks the system for many random parts at once.

    A finalizer may call the function while it runs.
    """
    sequence, parts = itertools.count(1), list[int]()

    def number() -> int:
        if not parts:
            parts.extend(array("Q", secrets.token_bytes(8 * _RANDOM_PARTS)))
        return (parts.pop() >> 25) << SEQUENCE_BITS | next(sequence) % (1 << SEQUENCE_BITS)

    return number


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
        self._freed: dict[RefId, None] = {}  # values of this process that others made
        self._dead: set[int] = set()
        self._actions: list[Action] = []

    # --- what a program does ---------------------------------------------------------------

    def own(self) -> RefId:
        """Create a value of this process, with one object that refers to it."""
        ref = self._next()
        self._entries[ref] = _ReferenceState(self.me, local=1)
        return ref

    def create(self, owner: int) -> RefId:
        """Create a reference to a value that a call makes at `owner`."""
        ref = self._next()
        self._entries[ref] = _ReferenceState(owner, local=1, held=False)
        return ref

    def pack(self, ref: RefId, to: int) -> tuple[int, Token]:
        """Put a reference into a message to `to`; return its owner, and the token to send with it.

        Raises:
            KeyError: It is lost.
        """
        entry, token = self._entries[ref], self._next()
        entry.tokens.add(token)
        self._sent[token] = _SentToken(ref, to)
        return entry.owner, token

    def dropped(self, ref: RefId) -> list[Action]:
        """Handle that an object, or a message that was read and not unpacked, was freed."""
        if ref in self._entries:
            self._entries[ref].local -= 1
            self._settle(ref)
        return self._take()

    def not_sent(self, tokens: Iterable[Token], make: RefId | None = None) -> list[Action]:
        """Take back the tokens of a message that was never sent, and what it was to make."""
        for token in tokens:
            self._end(token)
        if make is not None:
            self._lose(make)
        return self._take()

    # --- messages --------------------------------------------------------------------------

    def made(self, ref: RefId, sender: int) -> None:
        """Handle a call that makes a value here; when it has ended, send `Held` to the sender.

        Raises:
            ValueError: Another process than the sender has created the reference.
        """
        if ref[0] != sender:
            raise ValueError(f"worker {sender} makes a value for a reference of worker {ref[0]}")
        entry = self._entries.get(ref)
        if entry is None:
            self._entries[ref] = _ReferenceState(self.me, holders={sender})
        else:
            entry.made = True
            entry.holders.add(sender)

    def arrived(
        self, ref: RefId, owner: int, sender: int, token: Token
    ) -> tuple[bool, list[Action]]:
        """Handle a reference in a message, before it is unpacked; False if it is lost.

        It counts as one object, until `dropped`.
        """
        if owner in self._dead or sender in self._dead:
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

    def expect(self, ref: RefId) -> bool:
        """Whether this is the reference of a value of this process, which is made or may be made.

        A process that knows the number was sent the reference, and its `Hold` may arrive later.
        """
        entry = self._find_own(ref)
        return entry is not None and entry.owner == self.me

    def heard(self, sender: int, message: Message) -> list[Action]:
        """Handle a message of this protocol."""
        if sender not in self._dead:
            self._hear(sender, message)
        return self._take()

    def died(self, peer: int) -> list[Action]:
        """Handle that a process is gone for good; all events of it came before."""
        if peer in self._dead:
            return []
        self._dead.add(peer)
        for ref, entry in list(self._entries.items()):
            if entry.owner == peer or (ref[0] == peer and not entry.made):
                self._lose(ref)
        for token in [token for token, sent in self._sent.items() if sent.to == peer]:
            self._end(token)
        for ref, entry in list(self._entries.items()):
            entry.holders.discard(peer)
            self._settle(ref)
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

    @property
    def num_unsettled(self) -> int:
        """How many holds and tokens await an answer."""
        return len(self._sent) + sum(not entry.held for entry in self._entries.values())

    # --- steps -----------------------------------------------------------------------------

    def _next(self) -> tuple[int, int]:
        return self.me, self._new_number()

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _send(self, to: int, message: Message) -> None:
        if to == self.me:
            self._hear(to, message)
        elif to not in self._dead:
            self._actions.append(Send(to, message))

    def _hear(self, sender: int, message: Message) -> None:
        # Not `match`, which would take a third of the time of a call by a reference.
        if isinstance(message, TokenAccepted):
            if self._was_sent(message.token, sender):
                self._end(message.token)
            return
        ref = message.ref
        entry = self._entries.get(ref)
        if isinstance(message, Drop):
            if entry is not None:
                entry.holders.discard(sender)
                self._settle(ref)
        elif isinstance(message, Hold):
            entry = self._find_own(ref)
            if entry is not None:
                entry.holders.add(sender)
            self._send(sender, ValueGone(ref) if entry is None else Held(ref))
        elif entry is not None and entry.owner == sender:  # else forged
            if isinstance(message, Held):
                self._confirm_hold(ref, entry)
            else:
                self._lose(ref)

    def _was_sent(self, token: Token, to: int) -> bool:
        sent = self._sent.get(token)
        return sent is not None and sent.to == to

    def _find_own(self, ref: RefId) -> _ReferenceState | None:
        """Return a value of this process, also if the call that makes it may not have arrived."""
        entry = self._entries.get(ref)
        coming = ref[0] != self.me and ref[0] not in self._dead and ref not in self._freed
        if entry is None and coming:
            entry = self._entries[ref] = _ReferenceState(self.me, made=False)
        return entry

    def _confirm_hold(self, ref: RefId, entry: _ReferenceState) -> None:
        entry.held = True
        if entry.waiting:
            waiting, entry.waiting = entry.waiting, []
            for sender, token in waiting:
                self._send(sender, TokenAccepted(token))
        self._settle(ref)

    def _end(self, token: Token) -> None:
        """No longer keep a reference for one message."""
        sent = self._sent.pop(token, None)
        if sent is not None and sent.ref in self._entries:
            self._entries[sent.ref].tokens.discard(token)
            self._settle(sent.ref)

    def _settle(self, ref: RefId) -> None:
        """Drop a reference that is not needed here anymore."""
        entry = self._entries.get(ref)
        if entry is None or entry.local > 0 or entry.tokens or entry.holders or not entry.held:
            return
        if not entry.made:
            return  # its maker holds it, and perhaps waits for the value
        del self._entries[ref]
        if entry.owner == self.me:
            self._actions.append(Freed(ref))
            if entry.made and ref[0] != self.me:
                self._freed[ref] = None
                if len(self._freed) > _KEPT:
                    del self._freed[next(iter(self._freed))]
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
