"""Drawn calls on both channels of a group, and what they must give; for ranks of any kind.

A plan has a list of calls for each channel, in their order. `threads` runs each channel's calls
from several threads of its own, which hand each other the turn; so the two channels run at their
own pace, on each rank another. `one_thread` starts all calls from one thread, in an order of the
channels that every rank has for itself, and waits in another order.

A rank's tensor of call k of channel c holds `base(c, k) + rank`, so results are known by hand.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from hypothesis import strategies as st

import dure as dist
from dure.comm.world import current_world

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
COUNTS = (1, 8, 9, 1000, 4097, 70_001)
"""Elements a rank: inside a header, through staging in one piece, and in several."""
THREADS = 2
"""Of a channel."""


class Drawn(NamedTuple):
    """One call."""

    op: str
    count: int
    is_async: bool
    thread: int


calls = st.builds(
    Drawn,
    st.sampled_from(OPS),
    st.sampled_from(COUNTS),
    st.booleans(),
    st.integers(0, THREADS - 1),
)
plans = st.tuples(st.lists(calls, max_size=12), st.lists(calls, max_size=12))


def base(channel: int, k: int) -> int:
    return 1000 * (channel + 1) + 10 * k


class Started:
    """A call under way, and what its output must be."""

    def __init__(self, group: dist.ProcessGroup, channel: int, k: int, call: Drawn) -> None:
        n, me, b = group.size(), group.rank(), base(channel, k)
        view = group.channel(channel)
        mine = torch.full((call.count,), float(b + me))
        total = float(n * b + n * (n - 1) // 2)
        parts = torch.arange(n).repeat_interleave(call.count) + float(b)
        self.what = (channel, k, call)
        if call.op == "all_reduce":
            self.out, self.want = mine, torch.full((call.count,), total)
            self.work = view.all_reduce(mine, async_op=call.is_async)
        elif call.op == "broadcast":
            self.out, self.want = mine, torch.full((call.count,), float(b + k % n))
            self.work = view.broadcast(mine, k % n, async_op=call.is_async)
        elif call.op == "all_gather":
            self.out, self.want = torch.empty(n * call.count), parts
            self.work = view.all_gather_single(self.out, mine, async_op=call.is_async)
        elif call.op == "reduce_scatter":
            self.out, self.want = torch.empty(call.count), torch.full((call.count,), total)
            whole = mine.repeat(n)
            self.work = view.reduce_scatter_single(self.out, whole, async_op=call.is_async)
        elif call.op == "all_to_all":
            self.out, self.want = torch.empty(n * call.count), parts
            self.work = view.all_to_all_single(self.out, mine.repeat(n), async_op=call.is_async)
        else:
            self.out, self.want = mine, mine.clone()
            self.work = view.barrier(async_op=call.is_async)

    def check(self) -> None:
        if self.work is not None:
            self.work.wait()
        assert torch.equal(self.out, self.want), self.what


def _group() -> dist.ProcessGroup:
    group = current_world().default
    assert group is not None
    return group


def threads(plan: tuple[list[Drawn], list[Drawn]]) -> None:
    """Run a plan, each channel from threads of its own."""
    group = _group()
    errors: list[BaseException] = []
    both = [_Channel(group, c, drawn, errors) for c, drawn in enumerate(plan)]
    started = [t for channel in both for t in channel.threads]
    for t in started:
        t.start()
    for t in started:
        t.join()
    if errors:
        raise errors[0]


class _Channel:
    """The threads of one channel; call k begins when call k - 1 was started, or is over."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        channel: int,
        drawn: list[Drawn],
        errors: list[BaseException],
    ) -> None:
        self.group, self.channel, self.drawn, self.errors = group, channel, drawn, errors
        self.turn = threading.Condition()
        self.next = 0
        self.threads = [
            threading.Thread(target=self.run, args=(t,), name=f"channel {channel} thread {t}")
            for t in range(THREADS)
        ]

    def run(self, thread: int) -> None:
        pending: list[Started] = []
        for k, call in enumerate(self.drawn):
            if call.thread != thread:
                continue
            with self.turn:
                self.turn.wait_for(lambda k=k: self.next == k)
            try:
                pending.append(Started(self.group, self.channel, k, call))
                if k % 3 == 0:
                    pending.pop(0).check()
            except BaseException as error:
                self.errors.append(error)
            with self.turn:
                self.next += 1
                self.turn.notify_all()
        try:
            for started in pending:
                started.check()
        except BaseException as error:
            self.errors.append(error)


def one_thread(plan: tuple[list[Drawn], list[Drawn]], picks: list[int], waits: list[int]) -> None:
    """Start all calls of a plan from this thread; `picks` says which channel is next, by rank."""
    group = _group()
    left = [list(enumerate(drawn)) for drawn in plan]
    pending: list[Started] = []
    for i in range(sum(map(len, left))):
        c = (picks[i % len(picks)] >> group.rank()) & 1
        if not left[c]:
            c = 1 - c
        k, call = left[c].pop(0)
        pending.append(Started(group, c, k, call._replace(is_async=True)))
    for i in range(len(pending)):
        pending.pop(waits[i % len(waits)] % len(pending)).check()
