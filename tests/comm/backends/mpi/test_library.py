"""How the mpi backend finds MPI, and a launcher of it."""

import pytest

from dure.comm.backends.mpi import library as mpi_library
from dure.errors import UsageError


def test_missing_mpi4py_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(mpi_library, "installed", lambda: False)
    with pytest.raises(UsageError) as info:
        mpi_library.load.__wrapped__()
    assert "'.[mpi]'" in info.value.fix


@pytest.mark.parametrize("mark", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"])
def test_launcher_is_known_by_its_marks(monkeypatch, mark):
    for other in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(other, raising=False)
    assert not mpi_library.launched()
    monkeypatch.setenv(mark, "2")
    assert mpi_library.launched()
