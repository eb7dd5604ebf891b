"""Lists of hosts and of counts."""

import pytest

from dure.placement import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("cn[08-11]", ["cn08", "cn09", "cn10", "cn11"]),
        ("login,gpu-[1-2]-ib", ["login", "gpu-1-ib", "gpu-2-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.0.[4,9]", ["10.0.0.4", "10.0.0.9"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_list_of_hosts_expands(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("4(x2),1", [4, 4, 1]), ("2(x3),1", [2, 2, 2, 1])]
)
def test_list_of_counts_expands(text, counts):
    assert list(expand_counts(text)) == counts


HOSTS = ["", "a,,b", "n[1-", "n]1[", "n[3-1]", "n[a]", "n[[1]]", "n[]", "n[0-999999999]"]
COUNTS = ["", "x", "4(x)", "4(2)", "-1", "1(x999999999)"]


@pytest.mark.parametrize(
    ("expand", "text"), [(expand_hosts, x) for x in HOSTS] + [(expand_counts, x) for x in COUNTS]
)
def test_malformed_list_or_one_of_too_many_is_an_error(expand, text):
    with pytest.raises(ValueError):
        expand(text)
