"""What `dure bench` is asked: read, completed, or refused in a line before anything starts."""

import msgspec
import pytest

from dure.cli.app import run_command_line
from dure.cli.bench.plan import DTYPES, OPERATIONS, parse_names, parse_sizes, show_size
from dure.errors import UsageError
from tests.cli.bench.bench_sample import PLAN

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:200:4x", [8, 32, 128, 200]),
        ("8:64:2", [8, 16, 32, 64]),
        ("1K:1K", [1024]),
        ("1M,8,64KiB,8b", [8, 65536, 1 << 20]),
    ],
)
def test_sizes_are_a_list_or_a_progression(text, sizes):
    assert list(parse_sizes(text)) == sizes


def test_names_may_be_repeated_joined_or_all():
    named = parse_names("operation", ["reduce", "barrier,reduce"], OPERATIONS)
    assert named == ("reduce", "barrier")
    assert parse_names("dtype", ["all"], DTYPES) == tuple(DTYPES)


@pytest.mark.parametrize(
    "words",
    [
        *(["--sizes", text] for text in ("", "x", "8:", "64:8:2", "8:64:1x", "0", "8:64:2:2")),
        *(["--sizes", text] for text in ("-8", "1.5M", "8,,9")),
        *(["--ranks", text] for text in ("0", "-1", "two", "")),
        *(["--against", text] for text in ("nccl", "mpi@", "mpi@/no/such/python")),
        ["--op", "al_reduce"],
        ["--op", "all,reduce"],
        ["--dtype", "float31"],
        ["--backend", "tcp"],
        ["--redop", "mean"],
        ["--redop", "avg", "--dtype", "int32"],
        ["--root", "2", "--ranks", "2"],
        ["--op", "sendrecv", "--ranks", "1"],
        ["--ranks", "4000", "--sizes", "1G"],
        ["--json", "/no/such/folder/x.json"],
        ["--from", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line_and_exit_code_two(words, capfd):
    assert run_command_line(["bench", *words]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("dure bench: error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


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


def test_divided_operations_have_an_element_a_rank_at_least():
    assert OPERATIONS["all_gather"].elements(8, 4, 4) == 4
    assert OPERATIONS["all_gather"].elements(36, 4, 4) == 8
    assert OPERATIONS["all_reduce"].elements(36, 4, 4) == 9
    assert OPERATIONS["all_reduce"].elements(1, 8, 4) == 1
