"""What cannot be read is passed over, and where values came from."""

from __future__ import annotations

import pytest

from dure.placement import System, detect
from tests.placement import environments as seen


def test_malformed_number_is_passed_over_with_a_note():
    found = detect(seen.SLURM_STEP | {"SLURM_PROCID": "five"})
    assert found.member is None
    assert any("SLURM_PROCID" in note for note in found.notes)


@pytest.mark.parametrize("hosts", ["[", "[" * 100_000, '["a", 1]', '{"algo-2": 1}', "algo-2", "[]"])
def test_list_of_hosts_that_is_none_is_passed_over(hosts):
    assert detect(seen.SAGEMAKER | {"SM_HOSTS": hosts}).system is System.NOBODY


def test_every_value_has_its_source():
    for environ in seen.ALL:
        found = detect(environ)
        kept = [reason.what for reason in found.reasons]
        if found.member is not None and found.member.local_rank is not None and found.slot is None:
            assert "rank" in kept
        assert not found.endpoint or "endpoint" in kept
        assert all(reason.source for reason in found.reasons)
