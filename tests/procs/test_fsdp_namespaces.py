"""Fully sharded training over hosts that are network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dure.native import available as native_available
from procs.hosts import hosts, start_job, why_not

PROGRAM = Path(__file__).parent / "programs" / "fsdp_over_hosts.py"

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine"),
]


def test_training_equals_one_rank_2_hosts_of_2_ranks(tmp_path: Path) -> None:
    with hosts(2, "fsdp") as made:
        ranks = start_job(made, 2, [PROGRAM, tmp_path], tmp_path / "key")
        ends = [(r.communicate(timeout=100)[1], r.returncode) for r in ranks]
    assert [code for _, code in ends] == [0] * 4, ends
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert {r["backend"] for r in reports} == {"hybrid"}
    assert all(r[way] < 1e-12 for r in reports for way in ("shared", "gathered"))
