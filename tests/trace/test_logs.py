"""What is shown of Dure's log, where, and at which level."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dure
from dure import env
from dure.errors import UsageError, UsageWarning
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
    with pytest.raises(UsageError, match=name):
        env.check_flags()
    with pytest.raises(UsageError, match=name):
        logs.configure()
    monkeypatch.setattr(logs, "_read", None)
    monkeypatch.setattr(logs, "_has_warned", False)
    with pytest.warns(UsageWarning, match=name):
        assert logs.logger("comm") is COMM
    assert logs.logger("comm") is COMM  # and no second warning, which would be an error


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


def test_without_variables_the_program_decides() -> None:
    logs.configure()
    assert logging.getLogger("dure").handlers == []
    assert logging.getLogger("dure").level == logging.NOTSET
    assert logging.getLogger("dure").propagate


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


def test_line_that_goes_to_loguru_is_not_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = """
import logging
class InterceptHandler(logging.Handler):
    def emit(self, record):
        logger.log(record.levelname, record.getMessage())
"""
    logger: Any = type("Logger", (), {"__module__": "loguru._logger"})()
    type(logger).log = lambda self, level, text: print(text, file=sys.stderr)
    names: dict[str, Any] = {"logger": logger, "__name__": "program"}
    exec(recipe, names)
    handler = names["InterceptHandler"]()
    logging.getLogger().addHandler(handler)
    try:
        logs.show({"dure": "INFO"})
        COMM.info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.count("once") == 1


def test_line_that_cannot_be_written_is_a_warning_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @logs.never_fails
    def report(rank: int) -> None:
        raise OSError(f"no /proc on rank {rank}")

    report(0)
    assert "no /proc on rank 0" in caplog.text


def test_closed_standard_error_ends_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.show({"dure": "INFO"})
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        COMM.info("nobody reads it")


def test_levels_that_the_program_has_set_since_are_left_alone() -> None:
    logs.show({"dure": "DEBUG"})
    logging.getLogger("dure").setLevel(logging.ERROR)
    try:
        logs.show({})
        assert logging.getLogger("dure").level == logging.ERROR
    finally:
        logging.getLogger("dure").setLevel(logging.NOTSET)


def test_variables_are_read_again_only_when_they_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DURE_LOG", "info")
    logs.configure()
    logs.show({})  # as a program that sets a debug level
    logs.configure()
    assert COMM.getEffectiveLevel() == logging.getLogger().level
    monkeypatch.setenv("DURE_LOG", "debug")
    logs.configure()
    assert COMM.getEffectiveLevel() == logging.DEBUG


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
    assert {"comm", "launch", "parallel", "rpc", "store"} <= used


def test_loggers_that_a_configuration_has_disabled_write_again_if_dure_log_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DURE_LOG", "info")
    logs.configure()
    COMM.disabled = True  # as `logging.config.dictConfig` does
    try:
        logs.configure()
        COMM.info("shown")
    finally:
        COMM.disabled = False
    assert "shown" in capsys.readouterr().err


def test_sizes_just_below_a_unit_have_no_exponent() -> None:
    assert [logs.size_text(n) for n in (1000, 1023, 1536 << 20)] == ["1000 B", "1023 B", "1.5 GiB"]
