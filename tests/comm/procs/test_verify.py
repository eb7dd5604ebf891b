"""Verification over Gloo: ranks that call different things all learn it before data move."""

from __future__ import annotations

import os

import pytest
import torch

import dure as dist
from dure.comm.backends.verify import wanted
from tests.comm.conformance import suite
from tests.comm.options import options

ORDER_IS_GLOOS = ("case_order_of_reduction_is_that_of_ranks",)


def keys(rank: int) -> tuple[int, int]:
    """Count the group's keys before and after a number of calls."""
    group = dist.new_group(backend="gloo", pg_options={"verify": True})
    dist.barrier(group)
    before = len(group.store.list_keys())
    works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for _ in range(20)]
    t = torch.ones(8)
    dist.all_reduce(t, group=group)
    assert t.tolist() == [3.0] * 8
    assert all(w is not None and w.wait() for w in works)
    dist.barrier()
    after = len(group.store.list_keys())
    dist.barrier()
    dist.destroy_process_group(group)
    return before, after


def test_calls_leave_no_keys_in_the_store(process_pool):
    for before, after in process_pool(3, "gloo").run(keys):
        assert before == after


def run_verified(rank: int, folder: str, subject: str) -> list[str]:
    os.environ["DURE_VERIFY"] = "1"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return suite.run(rank, subject, ORDER_IS_GLOOS)


@pytest.mark.parametrize("subject", ["failing", "moving", "messages"])
def test_verified_gloo_keeps_the_whole_contract_with_2_ranks(subject, process_pool, tmp_path):
    ran = process_pool(2, "gloo").run(run_verified, str(tmp_path), subject)
    suite.check(ran, subject, ORDER_IS_GLOOS)


def test_verification_is_asked_for_by_variable_or_option(monkeypatch):
    assert not wanted(options())
    assert wanted(options(pg_options={"verify": True}))
    monkeypatch.setenv("DURE_VERIFY", "1")
    assert wanted(options()) and not wanted(options(pg_options={"verify": False}))
