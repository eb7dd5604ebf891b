"""What the measured operations work on."""

from dure.cli.bench.operations import OPERATIONS


def test_divided_operations_have_an_element_per_rank_at_least():
    assert OPERATIONS["all_gather"].elements(8, 4, 4) == 4
    assert OPERATIONS["all_gather"].elements(36, 4, 4) == 8
    assert OPERATIONS["all_reduce"].elements(36, 4, 4) == 9
    assert OPERATIONS["all_reduce"].elements(1, 8, 4) == 1
