"""What is shown of Dure's log, where, and at which level."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure
from dure import env
from dure.errors import UsageError
from dure.trace import logs

SOURCES = Path(dure.__file__).parent
COMM, STORE = logging.getLogger("dure.comm"), logging.getLogger("dure.store")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DURE_LOG", "TORCH_DISTRIBUTED_DEBUG", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    logs.show({})


@pytest.mark.parametrize(
    ("log", "debug", "levels"),
    [
        ("", "", {}),
        ("info", "", {"dure": "INFO"}),
        ("DEBUG", "INFO", {"dure": "DEBUG"}),  # comes before torch's
        ("dure.comm=debug", "", {"dure.comm": "DEBUG"}),
        (" info , dure.comm.x=Debug,", "", {"dure": "INFO", "dure.comm.x": "DEBUG"}),
        ("", "off", {}),
        ("", "INFO", {"dure": "INFO"}),
        ("", "detail", {"dure": "DEBUG"}),
    ],
)
def test_levels_that_variables_ask_for(
    monkeypatch: pytest.MonkeyPatch, log: str, debug: str, levels: dict[str, str]
) -> None:
    monkeypatch.setenv("DURE_LOG", log)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    logs.configure()
    for name in ("dure", *env.LOGGERS, "dure.comm.x"):
        assert logging.getLogger(name).level == logging.getLevelName(levels.get(name, "NOTSET"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("DURE_LOG", v) for v in ("1", "loud", "dure.com=info", "comm=info", "info=dure", "=")],
        ("DURE_LOG", "dure.comm=info=debug"),
        ("TORCH_DISTRIBUTED_DEBUG", "1"),
    ],
)
def test_other_values_are_refused_at_the_start_but_not_by_an_import(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(logs, "_read", None)
    monkeypatch.setattr(logs, "_refused", None)
    assert logs.logger("comm") is COMM
    with pytest.raises(UsageError, match=name):
        logs.configure()


def test_lines_go_to_the_standard_error_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.show({"dure.comm": "INFO"})
    COMM.info("before %s", "it")
    COMM.debug("not shown")
    STORE.info("not shown")
    STORE.warning("a warning")
    monkeypatch.setenv("RANK", "3")
    COMM.info("started")
    monkeypatch.setattr(logs, "find_rank", lambda: 1)
    COMM.info("joined")
    assert capsys.readouterr().err.splitlines() == [
        "[dure] INFO dure.comm: before it",
        "[dure] WARNING dure.store: a warning",
        "[dure rank 3] INFO dure.comm: started",
        "[dure rank 1] INFO dure.comm: joined",
    ]


@pytest.mark.parametrize(
    ("level", "to_terminal", "lines"),
    [(logging.DEBUG, True, 1), (logging.ERROR, True, 1), (logging.DEBUG, False, 2)],
)
def test_line_that_the_program_prints_is_not_printed_twice(
    capsys: pytest.CaptureFixture[str], level: int, to_terminal: bool, lines: int
) -> None:
    other = sys.stderr if to_terminal else io.StringIO()
    handler = logging.StreamHandler(other)
    handler.setLevel(level)
    logging.getLogger().addHandler(handler)
    try:
        logs.show({"dure": "INFO"})
        COMM.info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    printed = capsys.readouterr().err
    printed += other.getvalue() if isinstance(other, io.StringIO) else ""
    assert printed.count("once") == lines


def test_what_is_the_same_on_all_ranks_is_info_on_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "dure.comm")
    for rank in range(3):
        logs.decided(COMM, rank, "chosen %d", 7)
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG", "DEBUG"]
    assert {record.getMessage() for record in caplog.records} == {"chosen 7"}
    caplog.set_level(logging.INFO, "dure.comm")
    assert [logs.reports(COMM, rank) for rank in range(2)] == [True, False]


def test_every_logger_of_the_sources_can_be_named() -> None:
    used = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r'logs\.logger\("(\w+)"\)', path.read_text())
    }
    assert {f"dure.{name}" for name in used} <= set(env.LOGGERS)
    assert {"comm", "parallel", "rpc", "store"} <= used
