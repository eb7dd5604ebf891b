"""Remote references, in every order of messages: never freed too early, always freed at last.

The network is played by lists. A link carries the calls and the protocol's messages of one process
to another; the messages arrive in order, and calls may arrive later than what was sent after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dure.rpc.references import (
    Action,
    Drop,
    Freed,
    Held,
    Hold,
    Message,
    ReferenceLost,
    References,
    RefId,
    Send,
    Token,
    TokenAccepted,
    ValueGone,
)
from tests.rpc.gates import references_to_others


@dataclass
class PendingCall:
    """A call that carries a reference, or makes one."""

    ref: RefId
    owner: int
    token: Token
    makes: bool = False


@dataclass
class World:
    """Processes, what is under way between them, and what each program holds."""

    size: int
    nodes: dict[int, References] = field(default_factory=dict)
    objects: dict[int, Counter[RefId]] = field(default_factory=dict)
    values: dict[RefId, int] = field(default_factory=dict)  # alive, by owner
    made: set[RefId] = field(default_factory=set)
    holders: dict[RefId, set[int]] = field(default_factory=dict)  # who has ever held it
    links: dict[tuple[int, int], list[Message | PendingCall]] = field(default_factory=dict)
    late: dict[tuple[int, int], list[PendingCall]] = field(default_factory=dict)
    running: list[tuple[int, RefId]] = field(default_factory=list)  # where, and what it makes
    dead: set[int] = field(default_factory=set)
    known: set[tuple[int, int]] = field(default_factory=set)  # who knows of whose death

    def __post_init__(self) -> None:
        for me in range(self.size):
            self.nodes[me], self.objects[me] = References(me, count(1).__next__), Counter()
            for other in range(self.size):
                if other != me:
                    self.links[me, other], self.late[me, other] = [], []

    # --- what can happen ------------------------------------------------------------------

    def own(self, me: int) -> None:
        ref = self.nodes[me].own()
        self.values[ref], self.objects[me][ref] = me, 1
        self.made.add(ref)

    def create(self, me: int, owner: int) -> None:
        ref = self.nodes[me].create(owner)
        self.objects[me][ref] = 1
        self.links[me, owner].append(PendingCall(ref, owner, ref, makes=True))

    def send(self, me: int, ref: RefId, to: int) -> None:
        owner, token = self.nodes[me].pack(ref, to)
        self.links[me, to].append(PendingCall(ref, owner, token))

    def drop(self, me: int, ref: RefId) -> None:
        self.objects[me] -= Counter([ref])
        self.do(me, self.nodes[me].dropped(ref))

    def deliver(self, by: int, to: int) -> None:
        self.take(by, to, self.links[by, to].pop(0))

    def deliver_late(self, by: int, to: int) -> None:
        self.take(by, to, self.late[by, to].pop(0))

    def overtake(self, by: int, to: int, fate: int) -> None:
        """Let some of the calls under way arrive later than what is sent after them."""
        link = self.links[by, to]
        late = [
            each for n, each in enumerate(link) if isinstance(each, PendingCall) and fate >> n & 1
        ]
        self.links[by, to] = [each for each in link if each not in late]
        self.late[by, to] += late

    def kill(self, me: int, kept: int) -> None:
        """End a process; of what it has sent, everybody gets a part."""
        self.dead.add(me)
        self.objects[me] = Counter()
        for other in range(self.size):
            if other != me:
                link = self.links[me, other]
                self.links[me, other] = link[: kept % (len(link) + 1)]
                self.links[other, me], self.late[other, me] = [], []
        for ref in [ref for ref, owner in self.values.items() if owner == me]:
            del self.values[ref]

    def learn(self, me: int, dead: int) -> None:
        self.known.add((me, dead))
        self.do(me, self.nodes[me].died(dead))

    # --- how ------------------------------------------------------------------------------

    def take(self, by: int, to: int, what: Message | PendingCall) -> None:
        node = self.nodes[to]
        if not isinstance(what, PendingCall):
            self.do(to, node.heard(by, what))
            return
        if what.makes:
            node.made(what.ref, by)
            self.values[what.ref] = to
            self.made.add(what.ref)
            self.running.append((to, what.ref))
        else:
            taken, actions = node.arrived(what.ref, what.owner, by, what.token)
            if taken:
                self.objects[to][what.ref] += 1
            self.do(to, actions)

    def end_call(self, number: int) -> None:
        """End a call that makes a value: the process that made the reference hears of it."""
        owner, ref = self.running.pop(number)
        if owner not in self.dead:
            self.do(owner, [Send(ref[0], Held(ref))])

    def do(self, me: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    if to not in self.dead:
                        self.links[me, to].append(message)
                case Freed(ref):
                    if ref in self.made:  # else a reference overtook the call, and was dropped
                        assert self.values.pop(ref) == me
                case ReferenceLost(ref):
                    self.objects[me].pop(ref, None)

    def move(self, kind: int, number: int) -> None:
        """Do one thing of a kind, if there is any; the number decides which."""
        living = [me for me in range(self.size) if me not in self.dead]
        pairs = [(a, b) for a in living for b in range(self.size) if a != b]
        open_to = [(a, b) for a, b in pairs if b not in self.dead]
        held = [(me, ref) for me in living for ref in +self.objects[me]]
        passing = [(me, ref, to) for me, ref in held for by, to in open_to if by == me]
        due = [(b, a) for a, b in pairs if self.links[b, a]]
        late = [(b, a) for a, b in pairs if self.late[b, a]]
        news = [(a, b) for a, b in pairs if b in self.dead and (a, b) not in self.known]
        news = [(a, b) for a, b in news if not self.links[b, a] and not self.late[b, a]]
        fate = number >> 8
        found: dict[str, list[Callable[[], None]]] = {
            "deliver": [partial(self.deliver, by, to) for by, to in due],
            "send": [partial(self.send, *way) for way in passing],
            "drop": [partial(self.drop, *each) for each in held],
            "learn": [partial(self.learn, *pair) for pair in news],
            "create": [partial(self.create, *pair) for pair in open_to],
            "own": [partial(self.own, me) for me in living],
            "end": [partial(self.end_call, number) for number in range(len(self.running))],
            "late": [partial(self.deliver_late, *pair) for pair in late],
            "overtake": [partial(self.overtake, *pair, fate) for pair in open_to],
            "kill": [partial(self.kill, me, fate) for me in living if len(living) > 2],
        }
        chosen = found[KINDS[kind]]
        if chosen:
            chosen[number % len(chosen)]()

    def check(self) -> None:
        """Whoever holds a value of a living process has it, unless who held it has died."""
        for me, objects in self.objects.items():
            for ref in +objects:
                self.holders.setdefault(ref, set()).add(me)
                if self.holders[ref] & self.dead:
                    continue
                used = references_to_others(self.nodes[me]).get(ref)
                owner = me if used is None else used
                if owner not in self.dead and ref in self.made:
                    assert ref in self.values, f"{me} holds {ref}, which {owner} has freed"

    def finish(self) -> None:
        """Drop everything, deliver everything; nothing may be left."""
        for me in range(self.size):
            for ref, times in list(self.objects[me].items()):
                for _ in range(times):
                    self.drop(me, ref)
        while True:
            while self.running:
                self.end_call(0)
            due = [
                (by, to)
                for by, to in self.links
                if to not in self.dead and (self.links[by, to] or self.late[by, to])
            ]
            for by, to in due:
                (self.deliver if self.links[by, to] else self.deliver_late)(by, to)
            for me in range(self.size):
                for ref, times in list(self.objects[me].items()):
                    for _ in range(times):
                        self.drop(me, ref)
            unknown = [
                (me, other)
                for other in self.dead
                for me in range(self.size)
                if me not in self.dead and (me, other) not in self.known
                if not self.links[other, me] and not self.late[other, me]
            ]
            for me, other in unknown:
                self.learn(me, other)
            if not due and not unknown:
                break
        for me in set(range(self.size)) - self.dead:
            node = self.nodes[me]
            users = references_to_others(node)
            assert (node.holders(), users, node.num_unsettled) == ({}, {}, 0)
        assert self.values == {}


KINDS = ["deliver"] * 8 + ["send"] * 4 + ["drop"] * 3 + ["learn"] * 2
KINDS += ["create", "own", "late", "overtake", "kill", "end", "end"]
MOVES = st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 2**16))


OVERTAKEN = [(8, 1), (20, 257), (0, 0), (12, 1), (19, 0)]
"""A reference comes before the call that makes its value, and is dropped before it."""


HISTORIES = given(st.integers(2, 4), st.lists(MOVES, min_size=20, max_size=80))


def check_history(size: int, moves: list[tuple[int, int]]) -> None:
    world = World(size)
    world.own(0)
    world.create(1, 0)
    for kind, number in moves:
        world.move(kind, number)
        world.check()
    world.finish()


@settings(max_examples=150)
@HISTORIES
@example(2, OVERTAKEN)
def test_never_freed_early_and_always_freed_at_last(
    size: int, moves: list[tuple[int, int]]
) -> None:
    check_history(size, moves)


def processes(number: int) -> list[References]:
    return [References(me) for me in range(number)]


def hand_on(owner: References, ref: RefId, to: References) -> None:
    """Make `to` a holder of what the owner itself sends."""
    _, token = owner.pack(ref, to.me)
    to.arrived(ref, owner.me, owner.me, token)
    owner.heard(to.me, Hold(ref))
    to.heard(owner.me, Held(ref))
    owner.heard(to.me, TokenAccepted(token))


def test_a_reference_passed_on_by_one_that_dies_is_kept_if_another_holds_it() -> None:
    owner, between, last = processes(3)
    ref = owner.own()
    hand_on(owner, ref, between)
    _, passed = between.pack(ref, 2)
    assert owner.died(1) == []  # the program has an object, too
    assert last.arrived(ref, 0, 1, passed) == (True, [Send(0, Hold(ref))])
    assert owner.heard(2, Hold(ref)) == [Send(2, Held(ref))]
    assert owner.dropped(ref) == []
    assert owner.holders() == {ref: (2,)}


@pytest.mark.parametrize("maker", [0, 3])
def test_a_reference_passed_on_by_one_that_dies_is_lost_if_no_other_holds_it(maker: int) -> None:
    owner, between, last, other = processes(4)
    ref = owner.own() if maker == 0 else other.create(0)
    if maker == 3:
        owner.made(ref, 3)
        owner.heard(3, Hold(ref))
    owner.heard(1, Hold(ref))
    between.arrived(ref, 0, maker, (maker, 7))
    _, passed = between.pack(ref, 2)
    if maker == 0:
        assert owner.dropped(ref) == []
    else:
        assert owner.heard(3, Drop(ref)) == []
    assert last.arrived(ref, 0, 1, passed) == (True, [Send(0, Hold(ref))])
    assert owner.died(1) == [Freed(ref)]
    assert last.died(1) == []
    assert not owner.expect(ref)
    assert owner.heard(2, Hold(ref)) == [Send(2, ValueGone(ref))]
    assert last.heard(0, ValueGone(ref)) == [ReferenceLost(ref)]


def test_a_process_cannot_make_what_another_one_has_made() -> None:
    owner, _, other = processes(3)
    owner.made((1, 1), 1)
    assert owner.holders() == {(1, 1): (1,)}
    for ref in ((1, 1), (0, 5)):
        with pytest.raises(ValueError, match="makes a value"):
            owner.made(ref, 2)
    other.made((2, 1), 2)  # its own, in itself


def test_a_reference_dropped_while_its_value_is_made_is_dropped_at_the_owner_afterwards() -> None:
    owner, user = processes(2)
    ref = user.create(0)
    owner.made(ref, 1)
    assert user.dropped(ref) == []
    assert user.heard(0, Held(ref)) == [Send(0, Drop(ref))]
    assert owner.heard(1, Drop(ref)) == [Freed(ref)]
    assert (user.num_unsettled, owner.num_unsettled, owner.holders()) == (0, 0, {})


def test_a_value_that_is_asked_for_before_its_call_arrives_outlives_other_processes() -> None:
    owner, _, maker, other = processes(4)
    ref = maker.create(0)
    assert owner.expect(ref)  # a fetch has overtaken the call
    assert owner.died(1) == []
    assert owner.heard(3, Hold(ref)) == [Send(3, Held(ref))]
    assert owner.heard(3, Drop(ref)) == []
    owner.made(ref, 2)
    assert maker.heard(0, Held(ref)) == []
    assert owner.heard(2, Drop(ref)) == [Freed(ref)]
    assert other.holders() == {}


def test_the_last_drop_frees() -> None:
    owner = References(0)
    ref = owner.own()
    _, token = owner.pack(ref, 1)
    owner.dropped(ref)
    owner.heard(1, Hold(ref))
    assert owner.heard(1, TokenAccepted(token)) == []
    assert owner.heard(1, Drop(ref)) == [Freed(ref)]
    assert owner.heard(1, Hold(ref)) == [Send(1, ValueGone(ref))]


def test_a_reference_cannot_be_guessed_from_others() -> None:
    owner = References(0)
    numbers = sorted(owner.own()[1] for _ in range(20))
    assert min(b - a for a, b in pairwise(numbers)) > 1_000_000
