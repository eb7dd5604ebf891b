"""Verification over Gloo: ranks that call different things all learn it before data move."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.verify import wanted
from dure.store import HashStore
from tests.comm import verify_ranks
from tests.comm.conformance import suite


def test_ranks_that_do_not_come_are_named_with_their_last_calls_3_ranks(process_pool):
    process_pool(3, "gloo").run(verify_ranks.come_late)


def test_calls_leave_no_keys_in_the_store(process_pool):
    for before, after in process_pool(3, "gloo").run(verify_ranks.keys):
        assert before == after


@pytest.mark.parametrize("subject", ["failing", "moving", "messages"])
def test_verified_gloo_keeps_the_whole_contract_with_2_ranks(subject, process_pool, tmp_path):
    ran = process_pool(2, "gloo").run(verify_ranks.run_verified, 2, str(tmp_path), subject)
    suite.check(ran, subject, verify_ranks.ORDER_IS_GLOOS)


def test_verification_is_asked_for_by_variable_or_option(monkeypatch):
    def options(pg_options: object = None) -> BackendOptions:
        return BackendOptions(
            store=HashStore(),
            rank=0,
            size=1,
            global_ranks=(0,),
            timeout=timedelta(seconds=1),
            name="g",
            pg_options=pg_options,
        )

    assert not wanted(options())
    assert wanted(options({"verify": True}))
    monkeypatch.setenv("DURE_VERIFY", "1")
    assert wanted(options()) and not wanted(options({"verify": False}))
