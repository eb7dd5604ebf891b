"""`dure.run.main`, which a program calls as it would call torchrun's."""

import signal

import pytest

import dure.launch
import dure.run


def test_main_returns_on_success_and_leaves_ctrl_c_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    for main in (dure.run.main, dure.launch.main):
        main(["--help"])
        assert "nproc" in capsys.readouterr().out
        assert signal.getsignal(signal.SIGINT) is before


def test_main_exits_with_the_code_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dure.run.main(["--no-such-option"])
    assert caught.value.code == 2
    assert "no-such-option" in capsys.readouterr().err
