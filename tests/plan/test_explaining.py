"""Terms of a layout, and their formulas."""

import pytest

from tests.cli.planned import LLAMA, answered


def test_terms_are_computed_as_their_formulas_say():
    found = answered(*LLAMA, "--explain", "fsdp=8,mb=1,recompute=full")
    terms = {(term["name"], term["unit"]): term for term in found["terms"]}
    seconds = sum(t["value"] for (_, unit), t in terms.items() if unit == "s")
    assert seconds == pytest.approx(found["seconds"])
    held = sum(t["value"] for (_, unit), t in terms.items() if unit == "bytes")
    assert held == pytest.approx(found["peak"])
    for term in terms.values():
        assert term["formula"]
        assert all(" = " in each and "before: " in each for each in term["constants"])
    # AdamW: 30 bytes a parameter of the rank's eighth, at 3.35 TB/s, times `adam`.
    parameters = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 2 * 128256 * 4096
    optimizer = terms["optimizer", "s"]
    (constant,) = optimizer["constants"]
    assert constant.startswith("adam = ")
    adam = float(constant.split()[2])
    expected = adam * 30 * parameters / 8 / 3.35e12
    assert optimizer["value"] == pytest.approx(expected, rel=1e-3)
    assert found["inputs"]["tokens"] == 8192
    assert found["inputs"]["memory"] == 3.35e12
