"""What cannot be read is passed over, and where values came from."""

from __future__ import annotations

from dure.placement import detect
from tests.placement import environments as seen


def test_malformed_number_is_passed_over_with_a_note():
    found = detect(seen.SLURM_STEP | {"SLURM_PROCID": "five"})
    assert found.member is None
    assert any("SLURM_PROCID" in note for note in found.notes)


def test_every_value_has_its_source():
    for environ in seen.ALL:
        found = detect(environ)
        kept = [reason.what for reason in found.reasons]
        if found.member is not None and found.member.local_rank is not None and found.slot is None:
            assert "rank" in kept
        assert not found.endpoint or "endpoint" in kept
        assert all(reason.source for reason in found.reasons)
