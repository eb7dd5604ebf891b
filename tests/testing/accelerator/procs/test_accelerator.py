"""The simulated accelerator, each time in a process of its own."""

from __future__ import annotations

import signal

import pytest

import dure as dist
from dure.errors import LaunchError
from tests.testing.accelerator import program

CASES = [name.removeprefix("case_") for name in vars(program) if name.startswith("case_")]


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Run all cases in one process; return the errors."""
    return dist.spawn(program.run, 1, (CASES,))[0]


@pytest.mark.parametrize("case", CASES)
def test_the_device(errors: dict[str, str], case: str):
    assert errors[case] == ""


def test_host_code_that_follows_an_address_ends():
    with pytest.raises(LaunchError) as caught:
        dist.spawn(program.read_by_host_code, 1)
    assert str(int(signal.SIGSEGV)) in str(caught.value) or "SIGSEGV" in str(caught.value)


def test_a_process_with_another_device_of_the_kind_is_refused():
    (error,) = dist.spawn(program.install_over_another_device, 1)
    assert error.startswith("UsageError: this process has another device")
    assert "other" in error
