"""What a process tells of its remote calls is found by others."""

import os

from dure.rpc.figures import Board, Figures, seen


def mine(name: str) -> list[Figures]:
    return [each.figures for each in seen() if (each.pid, each.name) == (os.getpid(), name)]


def test_figures_are_found_by_name_until_the_board_is_closed():
    board = Board("worker0")
    try:
        assert mine("worker0") == [Figures()]
        figures = Figures(1, 2, 3, 4, 2**40, 6, 7, 8)
        board.write(figures)
        assert mine("worker0") == [figures]
        assert mine("worker1") == []
    finally:
        board.close()
    assert mine("worker0") == []


def test_a_forked_child_is_no_worker_of_its_own():
    board = Board("worker0")
    try:
        ready, wait = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"1")
            os.read(wait[0], 1)
            os._exit(0)
        try:
            os.read(ready[0], 1)
            assert [each.pid for each in seen() if each.name == "worker0"] == [os.getpid()]
        finally:
            os.write(wait[1], b"1")
            os.waitpid(child, 0)
            for end in (*ready, *wait):
                os.close(end)
    finally:
        board.close()
