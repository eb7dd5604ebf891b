"""Memory of other processes that cannot be mapped."""

import os

import pytest

from dure import native
from dure.comm.memory import process_of
from dure.errors import CommError
from dure.store.identity import start_of

pytestmark = pytest.mark.needs("engine")

_NO_DESCRIPTOR = 1 << 20


def test_an_error_of_the_system_is_an_os_error_with_its_number() -> None:
    parent = os.getppid(), int(start_of(os.getppid()) or 0), _NO_DESCRIPTOR
    with pytest.raises(FileNotFoundError, match=str(_NO_DESCRIPTOR)):
        native.heap_peer(*parent)
    with pytest.raises(CommError):
        process_of(*parent)
