"""What thread-ranks leave in the flight recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import dure as dist
from dure.errors import Desync
from dure.testing import run_ranks


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
