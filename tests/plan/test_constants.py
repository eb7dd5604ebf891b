"""The constants of the cost model."""

from __future__ import annotations

from dure.plan.constants import described, document


def test_there_are_at_most_forty_constants_each_with_unit_meaning_and_source():
    constants = described()
    assert len(constants) <= 40
    for constant in constants.values():
        assert constant.unit and constant.meaning and "before: " in constant.source
        assert constant.value > 0
    fit = document("constants")["fit"]
    assert fit["rows"] > 1000 and len(fit["hash"]) == 16
    assert 0 < fit["left_out_within"] < fit["left_out_across"] < 0.3
