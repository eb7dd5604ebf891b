"""Pipelines over a backend that runs messages in the order of the calls, as NCCL does."""

import threading

import pytest
import torch

from dure import trace
from dure.comm.group import ProcessGroup
from dure.errors import UsageError
from dure.parallel.pipeline.launch_order import check_launch_order
from dure.schedules import lower, make_schedule
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    Nested,
    batches,
    of_nested,
    one_process,
    verify_same,
)


def check(name: str, stages: int, devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    schedule = make_schedule(name, stages=stages, microbatches=4, ranks=2)
    check_launch_order(lower(schedule, sharded=range(stages)), name, devices)


@pytest.mark.parametrize(
    ("name", "stages"), [("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 4), ("looped-bfs", 4)]
)
def test_messages_that_are_used_in_the_order_of_sending_are_accepted(name: str, stages: int):
    check(name, stages)


@pytest.mark.parametrize("name", ["zb-v", "interleaved-zero-bubble"])
def test_messages_that_are_used_in_another_order_are_refused(name: str):
    with pytest.raises(UsageError, match="in another order than they are sent"):
        check(name, 4)


def test_headers_need_a_backend_for_cpu_tensors():
    with pytest.raises(UsageError, match="needs one for CPU"):
        check("1f1b", 2, ("cuda",))


def test_messages_to_lower_ranks_have_a_channel_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProcessGroup, "orders_by_stream", lambda self, kind: True)
    torch.manual_seed(1)
    parts = [Nested(i, 2) for i in range(2)]
    seen: set[tuple[int, int | None, str]] = set()
    lock = threading.Lock()

    def note(event: trace.Event) -> None:
        if event.op == "isend":
            with lock:
                seen.add((event.rank, event.peer, event.group))

    hook = trace.add_hook(before=note)
    try:
        found = run_ranks(2, of_nested, "1f1b", 2, parts)
    finally:
        trace.remove_hook(hook)
    verify_same(found, one_process(parts, batches(2), 4))
    assert seen == {(0, 1, "world"), (1, 0, "world[1]")}


def test_a_schedule_that_would_mix_messages_up_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProcessGroup, "orders_by_stream", lambda self, kind: True)
    parts = [Nested(i, 4) for i in range(4)]
    with pytest.raises(UsageError, match="in another order than they are sent"):
        run_ranks(2, of_nested, "zb-v", 2, parts)
