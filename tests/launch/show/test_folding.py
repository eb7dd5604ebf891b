"""Lines that several ranks write alike are shown once, and nothing else is changed by it."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.show import folding
from dure.launch.show.folding import WINDOW_S, Entry, LineFolder, Prefixes, rank_set
from dure.launch.spec import Stream

RANKS = 4


@dataclass
class Unfolded:
    """What a folder gave, sorted by pipe again."""

    text: defaultdict[tuple[int, str], bytes] = field(default_factory=lambda: defaultdict(bytes))
    latest: float = 0.0

    def take(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            self.latest = max(self.latest, now - entry.at)
            _, stream = entry.owner  # pyright: ignore[reportGeneralTypeIssues]
            for rank in range(RANKS):
                if entry.ranks >> rank & 1:
                    self.text[rank, stream] += entry.text + b"\n"

    def wait(self, folder: LineFolder, until: float) -> None:
        while (at := folder.wake_at) is not None and at <= until:
            self.take(folder.due(at), at)


_line = st.sampled_from([b"", b"a", b"b", b"c", b"\x00\xff\r", b"x" * 20_000])
_step = st.one_of(
    st.tuples(
        st.integers(0, RANKS - 1),
        st.sampled_from(["stdout", "stderr"]),
        st.lists(_line, max_size=4),
    ),
    st.floats(0, 0.08),
)


@given(steps=st.lists(_step, max_size=40), full=st.integers(1, 20))
def test_unfolding_gives_back_every_rank_s_output_in_its_order(
    steps: list[tuple[int, Stream, list[bytes]] | float], full: int
) -> None:
    folder, shown = LineFolder(range(RANKS)), Unfolded()
    written: defaultdict[tuple[int, str], bytes] = defaultdict(bytes)
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "MAX_ENTRIES", full)
        for step in steps:
            if isinstance(step, float):
                now += step
                shown.wait(folder, now)
                continue
            assert not isinstance(step, int)
            rank, stream, lines = step
            pipe = (rank, stream)
            shown.take(folder.put(pipe, rank, stream, lines, now), now)
            written[pipe] += b"".join(line + b"\n" for line in lines)
    shown.wait(folder, now + WINDOW_S)
    assert folder.flush() == []
    assert {k: v for k, v in shown.text.items() if v} == {k: v for k, v in written.items() if v}
    assert shown.latest <= WINDOW_S + 1e-9


def both(folder: LineFolder, lines: dict[int, list[bytes]], now: float = 0.0) -> list[Entry]:
    found: list[Entry] = []
    for rank, text in lines.items():
        found += folder.put(rank, rank, "stdout", text, now)
    return found


def seen(entries: list[Entry]) -> list[tuple[int, bytes]]:
    return [(entry.ranks, entry.text) for entry in entries]


def test_line_of_all_ranks_leaves_at_once_and_of_some_when_its_window_is_over() -> None:
    folder = LineFolder(range(3))
    assert seen(both(folder, {0: [b"a"], 2: [b"a"], 1: [b"a"]})) == [(0b111, b"a")]
    assert folder.wake_at is None
    assert both(folder, {0: [b"a"], 2: [b"a"]}, now=5.0) == []
    assert folder.wake_at == 5.0 + WINDOW_S
    assert seen(folder.due(5.0 + WINDOW_S)) == [(0b101, b"a")]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (([b"a", b"a", b"b"], [b"a", b"a", b"b"]), [(3, b"a"), (3, b"a"), (3, b"b")]),
        (([b"a", b"b"], [b"b", b"a"]), [(1, b"a"), (3, b"b"), (2, b"a")]),  # in each one's order
    ],
)
def test_lines_fold_one_by_one(
    lines: tuple[list[bytes], list[bytes]], shown: list[tuple[int, bytes]]
) -> None:
    folder = LineFolder(range(2))
    assert seen(both(folder, dict(enumerate(lines))) + folder.flush()) == shown


def test_flood_is_bounded_in_memory() -> None:
    folder, waiting = LineFolder(range(2)), 0
    for i in range(20):
        lines = [b"%d %d" % (i, j) for j in range(1000)]
        waiting += len(lines) - len(folder.put("p", 0, "stdout", lines, 0.0))
        assert waiting <= folding.MAX_ENTRIES
    folder.put("p", 0, "stdout", [b"x" * 4000] * 1000, 0.0)
    assert sum(len(entry.text) for entry in folder.flush()) <= folding.MAX_BYTES


def test_prefix_tells_who_wrote_a_line() -> None:
    assert Prefixes(0, 2).of(0b10, colour=False) == b"[1] "
    assert Prefixes(0, 11).of(1 << 3, colour=False) == b"[ 3] "
    assert Prefixes(0, 1).of(1, colour=True) == b"\x1b[36m[0] \x1b[0m"
    assert Prefixes(0, 1, shown=False).of(1, colour=True) == b""
    assert Prefixes(0, 11).of(0b100111, colour=False) == b"[0-2,5] "
    assert Prefixes(8, 16, host="node7.cluster").of(0b111, colour=False) == b"[node7:8-10] "
    assert rank_set([4, 3, 1]) == "1,3-4"
