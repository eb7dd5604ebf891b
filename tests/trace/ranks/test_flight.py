"""What thread-ranks leave in the flight recorder."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

import dure as dist
from dure import trace
from dure.errors import Desync
from dure.testing import run_ranks
from dure.trace.events import State


def _since(start_ns: int, rank: int) -> list[trace.Record]:
    return [r for r in trace.recorded(rank) if r.start_ns >= start_ns]


def test_every_operation_of_2_ranks_is_noted_with_its_line():
    after = time.monotonic_ns()

    def body(rank: int) -> list[trace.Record]:
        t = torch.ones(8)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        dist.broadcast(t, src=1)
        work = dist.all_gather_single(torch.empty(16), t, async_op=True)
        assert work is not None
        work.wait()
        if rank == 0:
            dist.send(t, 1, tag=5)
        else:
            dist.recv(t, 0, tag=5)
        dist.barrier()
        return _since(after, rank)

    for rank, found in enumerate(run_ranks(2, body)):
        ops = ["all_reduce", "broadcast", "all_gather_single", ("send", "recv")[rank], "barrier"]
        assert [r.op for r in found] == ops
        assert [r.seq for r in found] == [1, 2, 3, 1, 4]
        assert {r.state for r in found} == {State.SUCCEEDED}
        assert {(r.rank, r.global_rank, r.world_size) for r in found} == {(rank, rank, 2)}
        assert (found[0].reduction, found[0].nbytes, found[0].dtype) == ("MAX", 32, "float32")
        assert found[1].peer == 1 and found[2].async_op and found[3].tag == 5
        assert {r.file for r in found} == {__file__}
        assert all(r.end_ns >= r.start_ns for r in found)


def test_a_mismatch_of_3_ranks_names_each_line_and_leaves_a_file_of_each_rank(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))

    def body(rank: int) -> str:
        dist.barrier()
        call: Any = (dist.all_reduce, dist.broadcast)[rank == 2]
        with pytest.raises(Desync) as info:
            call(torch.ones(4), *[0] * (rank == 2))
        assert all(f"{__file__}:" in call for call in info.value.calls.values())
        (note,) = info.value.__notes__
        return note

    notes = run_ranks(3, body)
    assert {p.name for p in tmp_path.iterdir()} == {f"rank{r}.json" for r in range(3)}
    for rank, note in enumerate(notes):
        content = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert content["reason"].startswith("Desync") and f"rank{rank}.json" in note
        last = content["records"][-1]
        assert (last["op"], last["error"]) == (("all_reduce", "broadcast")[rank == 2], "Desync")


def test_a_message_that_does_not_fit_names_both_lines():
    def body(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            with pytest.raises(Desync) as info:
                dist.recv(torch.ones(5), 0)
            assert all(f"{__file__}:" in call for call in info.value.calls.values())

    run_ranks(2, body)
