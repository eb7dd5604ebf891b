"""The agents' log: what is shortened says the same as what is not, whoever writes, reads or dies.

The store of these tests lets others act in the middle of what one does: before each of its
operations somebody else may write, read or make entries the past, from beginning to end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dure.errors import StoreError, StoreLost
from dure.launch.agent.chronicle import Chronicle, pack_entry
from dure.launch.agent.events import Event, Joined, Refused
from dure.launch.agent.journal import append, bury, entry_key, fetch, is_behind, seed, write_once
from dure.launch.agent.machine import Machine
from dure.launch.agent.settings import Settings
from dure.store import HashStore

KEEP = 3
WISHES = Settings()


class Tape(Machine):
    """A machine that keeps all that it hears."""

    heard: list[str] = []

    def apply(self, event: Event) -> None:
        assert isinstance(event, Refused)
        self.heard.append(event.why)


def tape() -> Tape:
    return Tape(WISHES)


def said(author: str, number: int) -> str:
    return f"{author} {number}"


def line(author: str, number: int) -> bytes:
    return pack_entry(Refused("h", said(author, number)), author, number)


def history(chronicle: Chronicle) -> list[str]:
    """Return all that a chronicle has ever heard."""
    past = chronicle.past()
    assert isinstance(past, Tape)
    for event in chronicle.events(chronicle.start):
        past.apply(event)
    return past.heard


class Meddled(HashStore):
    """A store in which others act before each operation."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self.meddle = meddle
        self.lost = False

    def _before(self) -> None:
        self.meddle()
        if self.lost:
            raise StoreLost("gone")

    def set(self, key: str, value: str | bytes) -> None:
        self._before()
        super().set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._before()
        return super().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        self._before()
        return super().delete_key(key)


@dataclass
class Author:
    """One who writes and reads, as a pulse does."""

    name: str
    store: Meddled
    chronicle: Chronicle = field(default_factory=lambda: Chronicle(tape, keep=KEEP))
    told: int = 0
    written: int = 0
    busy: bool = False

    def act(self, what: str) -> None:
        self.busy = True
        try:
            self.say() if what == "say" else self.read()
        except StoreLost:
            pass
        finally:
            self.busy = False

    def say(self) -> None:
        store, number = self.store, self.written + 1
        self.told = max(self.told, number)
        append(store, self.chronicle.end, line(self.name, number))
        if store is self.store:
            self.written = number

    def read(self) -> None:
        past, entries = fetch(self.store, self.chronicle.end)
        self.take_in(past, entries, anew=False)

    def take_in(self, past: bytes | None, entries: list[bytes], *, anew: bool) -> None:
        if anew or past is not None:
            self.chronicle = Chronicle(tape, past, keep=KEEP)
        for entry in entries:
            self.chronicle.add(entry)
        self.written = self.chronicle.heard(self.name)
        folded = False
        while self.chronicle.fold():
            folded = True
        if folded:
            bury(self.store, self.chronicle)

    def move(self, store: Meddled) -> None:
        self.store = store
        self.take_in(*fetch(store, 0), anew=True)


class Fate:
    """Draws who does what next, also in the middle of what another does."""

    def __init__(self, draw: random.Random, authors: int) -> None:
        self.draw, self.depth = draw, 0
        self.store = Meddled(self.meddle)
        self.authors = [Author(str(number), self.store) for number in range(authors)]

    def meddle(self) -> None:
        free = [author for author in self.authors if not author.busy]
        if self.depth < 3 and free and self.draw.random() < 0.2:
            self.depth += 1
            self.draw.choice(free).act(self.draw.choice(["say", "read", "say"]))
            self.depth -= 1

    def step(self) -> None:
        self.draw.choice(self.authors).act(self.draw.choice(["say", "say", "read"]))

    def quiet(self) -> None:
        self.depth = 3

    def settle(self) -> None:
        """Let all read, and write again what is missing."""
        self.quiet()
        for _ in range(2):
            for author in self.authors:
                author.read()
                while author.written < author.told:
                    author.say()
        for author in self.authors:
            author.read()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), authors=st.integers(1, 4), steps=st.integers(0, 120))
def test_everybody_hears_the_same_once_and_in_order_and_little_is_kept(
    seed: int, authors: int, steps: int
) -> None:
    fate = Fate(random.Random(seed), authors)
    for _ in range(steps):
        fate.step()
    fate.settle()
    heard = history(fate.authors[0].chronicle)
    assert sorted(heard) == sorted(
        said(author.name, number + 1) for author in fate.authors for number in range(author.told)
    )
    for author in fate.authors:
        assert history(author.chronicle) == heard
        mine = [what for what in heard if what.split()[0] == author.name]
        assert mine == [said(author.name, number + 1) for number in range(author.told)]
        assert author.chronicle.heard(author.name) == author.told
    newcomer = Author("new", fate.store)
    newcomer.read()
    assert history(newcomer.chronicle) == heard
    kept = fate.store.list_keys()
    assert len([key for key in kept if "/past/" in key]) <= 1
    assert len(kept) <= 2 + 2 * KEEP + authors  # holes that were written in: one a writer


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_a_store_that_dies_at_any_moment_leaves_all_with_the_same(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    fate = Fate(draw, 3)
    for _ in range(3):
        fate.depth = 0
        for _ in range(steps):
            fate.step()
        fate.store.lost = True
        for author in fate.authors:
            author.act("say")  # finds the store dead
        heir = draw.choice(fate.authors)
        fate.quiet()
        fate.store = Meddled(fate.meddle)
        seed_keys(fate.store, heir.chronicle)
        for author in fate.authors:
            author.move(fate.store)
    fate.settle()
    histories = [history(author.chronicle) for author in fate.authors]
    assert histories[0] == histories[1] == histories[2]
    assert len(set(histories[0])) == len(histories[0])


def seed_keys(store: Meddled, chronicle: Chronicle) -> None:
    seed(store, chronicle)
    past, entries = fetch(store, 0)
    again = Chronicle(tape, past, keep=KEEP)
    for entry in entries:
        again.add(entry)
    assert again.pack_past() == chronicle.pack_past()
    assert list(again.entries()) == list(chronicle.entries())


def told(store: HashStore, lines: int) -> Chronicle:
    """Write and read so many lines of one author."""
    chronicle = Chronicle(tape, keep=KEEP)
    for number in range(1, lines + 1):
        append(store, chronicle.end, line("a", number))
        chronicle.add(line("a", number))
        if chronicle.fold():
            bury(store, chronicle)
    return chronicle


def test_a_log_is_kept_whole_until_there_are_twice_as_many_as_must_be_kept() -> None:
    store = HashStore()
    assert (told(store, 2 * KEEP - 1).start, store.num_keys()) == (0, 2 * KEEP - 1)
    store = HashStore()
    chronicle = told(store, 2 * KEEP)
    assert (chronicle.start, chronicle.end) == (KEEP, 2 * KEEP)
    assert store.num_keys() == KEEP + 2


def test_what_comes_again_or_too_early_does_not_count() -> None:
    chronicle = Chronicle(tape, keep=KEEP)
    counts = [chronicle.add(line("a", n)) is not None for n in (1, 1, 3, 2, 2, 3)]
    assert counts == [True, False, False, True, False, True]
    assert chronicle.end == 6
    assert history(chronicle) == ["a 1", "a 2", "a 3"]
    assert (chronicle.heard("a"), chronicle.buried("a"), chronicle.heard("b")) == (3, 0, 0)
    assert chronicle.fold()
    assert chronicle.buried("a") == 1
    assert history(chronicle) == ["a 1", "a 2", "a 3"]


@pytest.mark.parametrize(
    "junk", [b"", b"\xc1", b"\x93\xa1a\x01\xc4\x01x", b"\x93\xa1\xff\x01\xc4\x00"]
)
def test_what_is_no_entry_is_refused_and_changes_nothing(junk: bytes) -> None:
    chronicle = Chronicle(tape, keep=KEEP)
    with pytest.raises(StoreError):
        chronicle.add(junk)
    assert (chronicle.end, chronicle.heard("a")) == (0, 0)
    with pytest.raises(StoreError):
        Chronicle(tape, junk)


def test_who_has_no_other_lines_counts_always() -> None:
    store = HashStore()
    chronicle = told(store, 4 * KEEP)
    for host in "ghh":  # who says the very same again adds nothing
        write_once(store, Refused(host, "other terms"))
    past, entries = fetch(store, chronicle.end)
    assert past is None
    assert [chronicle.add(entry) for entry in entries] == [
        Refused(host, "other terms") for host in "gh"
    ]


def test_who_is_behind_the_cut_starts_from_the_past() -> None:
    store = HashStore()
    chronicle = told(store, 4 * KEEP)
    assert is_behind(store, chronicle.start - 1)
    assert not is_behind(store, chronicle.start)
    assert fetch(store, chronicle.start) == (None, [entry for _, entry in chronicle.entries()])
    past, entries = fetch(store, chronicle.start - 1)
    assert past == chronicle.pack_past()
    assert len(entries) == chronicle.end - chronicle.start


def test_many_entries_are_read_as_few_are() -> None:
    store, lines = HashStore(), [line("a", number + 1) for number in range(200)]
    for number, entry in enumerate(lines):
        store.set(entry_key(number), entry)
    for number in (0, 71, 72, 127, 128, 192, 199, 200):
        assert fetch(store, number) == (None, lines[number:])


def test_a_writer_who_is_behind_writes_at_the_end_and_leaves_no_hole_filled() -> None:
    store = HashStore()
    chronicle = told(store, 4 * KEEP)
    append(store, 0, line("b", 1))
    assert not store.check([entry_key(0)])
    assert store.get(entry_key(chronicle.end)) == line("b", 1)


def test_what_one_left_who_died_while_shortening_is_removed_by_the_next() -> None:
    store = HashStore()
    chronicle = told(store, 3 * KEEP)
    for number in range(chronicle.start - 2, chronicle.start):
        store.set(entry_key(number), b"left")
    for number in range(3 * KEEP + 1, 4 * KEEP + 1):
        append(store, chronicle.end, line("a", number))
        chronicle.add(line("a", number))
    assert chronicle.fold()
    bury(store, chronicle)
    assert sorted(store.list_keys()) == sorted(
        ["dure/agents/cut", f"dure/agents/past/{chronicle.start}"]
        + [entry_key(number) for number in range(chronicle.start, chronicle.end)]
    )


def test_of_two_who_shorten_the_log_the_further_one_counts() -> None:
    store = HashStore()
    slow, fast = (told(HashStore(), lines) for lines in (2 * KEEP, 3 * KEEP))
    for number in range(3 * KEEP):
        store.set(entry_key(number), line("a", number + 1))
    bury(store, fast)
    bury(store, slow)
    assert not store.check([f"dure/agents/past/{slow.start}"])
    assert fetch(store, 0)[0] == fast.pack_past()


class Overtaken(HashStore):
    """A store in which somebody else moves the cut a little just before the first who wants to."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start: int | None = start
        self.early: list[str] = []

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        if key == "dure/agents/cut" and desired != b"-" and self.start is not None:
            self.set(key, str(self.start))
            self.start = None
        return super().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        number = int(key.rpartition("/")[2])
        if "/log/" in key and number >= int(self.get("dure/agents/cut")):
            self.early.append(key)
        return super().delete_key(key)


def test_no_entry_is_removed_before_the_cut_is_behind_it() -> None:
    near, far = (told(HashStore(), lines).start for lines in (2 * KEEP, 3 * KEEP))
    store = Overtaken(near)
    chronicle = told(HashStore(), 3 * KEEP)
    for number in range(3 * KEEP):
        store.set(entry_key(number), line("a", number + 1))
    bury(store, chronicle)
    assert store.early == []
    assert int(store.get("dure/agents/cut")) == far > near
    assert fetch(store, 0)[0] == chronicle.pack_past()


def test_a_store_without_the_past_that_it_speaks_of_is_lost() -> None:
    store = HashStore()
    chronicle = told(store, 2 * KEEP)
    store.delete_key(f"dure/agents/past/{chronicle.start}")
    with pytest.raises(StoreLost):
        fetch(store, 0)


@example(hosts=1)
@given(hosts=st.integers(1, 8))
def test_more_is_kept_of_a_job_of_many_hosts(hosts: int) -> None:
    chronicle = Chronicle(lambda: Machine(Settings(min_hosts=9, max_hosts=9)), keep=2 * 8)
    for number in range(1, hosts + 1):
        chronicle.add(pack_entry(Joined(str(number), str(number), 1), "a", number))
    while chronicle.start == 0:
        chronicle.add(pack_entry(Refused("h", ""), ""))
        chronicle.fold()
    while not chronicle.fold():
        chronicle.add(pack_entry(Refused("h", ""), ""))
    assert chronicle.end - chronicle.start == max(16, 8 * hosts)
    assert len(chronicle.past().present) == hosts
