"""What `dure bench` is asked: read, completed, or refused before anything starts."""

import msgspec
import pytest

from dure.cli.bench.plan import (
    DTYPES,
    OPERATIONS,
    Plan,
    parse_names,
    parse_ranks,
    parse_rivals,
    parse_sizes,
    show_size,
)
from dure.errors import UsageError

GIB = 1 << 30
PLAN = Plan(
    backend="shm",
    ops=("all_reduce",),
    dtypes=("float32",),
    redop="sum",
    ranks=(2,),
    sizes=(8, 1024),
    root=-1,
    arena=False,
    against=(),
    samples=3,
    sample_s=0.01,
)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:64M:4x", [8 * 4**i for i in range(12)] + [64 << 20]),
        ("8:64:2", [8, 16, 32, 64]),
        ("1K:1K", [1024]),
        ("1M,8,64KiB,8b", [8, 65536, 1 << 20]),
    ],
)
def test_sizes_are_a_list_or_a_progression(text, sizes):
    assert list(parse_sizes(text)) == sizes


@pytest.mark.parametrize(
    "text", ["", "x", "8:", "64:8:2", "8:64:1x", "0", "8:64:2:2", "-8", "1.5M", "1:64G:2x:", "8,,9"]
)
def test_sizes_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError):
        parse_sizes(text)


def test_more_sizes_than_anybody_wants_are_refused():
    with pytest.raises(UsageError):
        parse_sizes(",".join(str(i) for i in range(1, 100)))


def test_names_may_be_repeated_joined_or_all():
    assert parse_names("operation", ["reduce", "barrier,reduce"], OPERATIONS) == (
        "reduce",
        "barrier",
    )
    assert parse_names("dtype", ["all"], DTYPES) == tuple(DTYPES)
    for wrong in (["al_reduce"], ["all", "reduce"]):
        with pytest.raises(UsageError):
            parse_names("operation", wrong, OPERATIONS)


def test_ranks_are_whole_numbers_from_one():
    assert parse_ranks(["2,4", "2"]) == (2, 4)
    for wrong in ("0", "-1", "two", ""):
        with pytest.raises(UsageError):
            parse_ranks([wrong])


def test_rivals_are_gloo_and_mpi_of_any_python():
    assert parse_rivals(["gloo,mpi", "mpi@/opt/bin/python"]) == (
        "gloo",
        "mpi",
        "mpi@/opt/bin/python",
    )
    for wrong in ("nccl", "mpi@"):
        with pytest.raises(UsageError):
            parse_rivals([wrong])


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "tcp"},
        {"redop": "mean"},
        {"redop": "avg", "dtypes": ("int32",)},
        {"root": 2},
        {"ops": ("sendrecv",), "ranks": (1,)},
        {"sizes": (GIB,)},
    ],
)
def test_plan_that_cannot_be_measured_is_refused(change):
    PLAN.check(4 * GIB)
    with pytest.raises(UsageError):
        msgspec.structs.replace(PLAN, **change).check(4 * GIB)


def test_memory_counts_rivals_too():
    large = msgspec.structs.replace(PLAN, sizes=(GIB // 2,))
    large.check(4 * GIB)
    with pytest.raises(UsageError):
        msgspec.structs.replace(large, against=("gloo",)).check(4 * GIB)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(8, "8 B"), (1536, "1.5 KiB"), (1 << 26, "64 MiB"), (1 << 30, "1 GiB")]
)
def test_sizes_are_shown_with_their_unit(num_bytes, text):
    assert show_size(num_bytes) == text


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0), ("barrier", 0.0)],
)
def test_bus_bandwidth_of_four_ranks_follows_the_convention(op, factor):
    assert OPERATIONS[op].bus_factor(4) == factor


def test_divided_operations_have_an_element_a_rank_at_least():
    assert OPERATIONS["all_gather"].elements(8, 4, 4) == 4
    assert OPERATIONS["all_gather"].elements(36, 4, 4) == 8
    assert OPERATIONS["all_reduce"].elements(36, 4, 4) == 9
    assert OPERATIONS["all_reduce"].elements(1, 8, 4) == 1
