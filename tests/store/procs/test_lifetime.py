"""Programs that end without leaving their rendezvous."""

from pathlib import Path

import pytest

from tests.store.procs.store_programs import output, running


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize("end", ["pass", "del meeting"])
def test_a_program_that_ends_does_not_hang(end: str, port: int) -> None:
    code = "meeting = rendezvous(args[0], int(args[1]), 2, timeout=PATIENCE)\n" + end
    url = f"tcp://127.0.0.1:{port}"
    with running((code, url, "0"), (code, url, "1")) as programs:
        for program in programs:
            output(program)


def test_children_of_multiprocessing_leave_what_they_forgot(tmp_path: Path) -> None:
    code = """
import multiprocessing
def rank(number):
    rendezvous(f"file://{args[0]}", number, 2, timeout=PATIENCE)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number,)) for number in range(2)]
    for process in ranks: process.start()
    for process in ranks: process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
"""
    with running((code, str(tmp_path / "meeting"))) as (program,):
        output(program)
    assert not (tmp_path / "meeting").exists()
