"""The exception tree: who catches what."""

import pickle

import pytest
import torch.distributed as torch_dist

import dure
from dure import errors

WITH_TORCHS_NAME = (
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "QueueEmptyError",
)


def test_every_class_is_exported():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(errors.__all__)
    assert [name for name in errors.__all__ if getattr(dure, name, None) is None] == []


@pytest.mark.parametrize("name", WITH_TORCHS_NAME)
def test_classes_with_torchs_names_have_torchs_tree(name):
    ours, theirs = getattr(errors, name), getattr(torch_dist, name)
    over = {base.__name__ for base in theirs.__mro__}
    assert over <= {base.__name__ for base in ours.__mro__}
    others = set(WITH_TORCHS_NAME) - over
    assert not others & {base.__name__ for base in ours.__mro__}


@pytest.mark.parametrize(
    ("name", "caught_as"),
    [
        ("CommError", "DistBackendError"),
        ("CommTimeout", "DistBackendError"),
        ("PeerLost", "DistBackendError"),
        ("Desync", "DistBackendError"),
        ("Aborted", "DistBackendError"),
        ("StoreError", "DistStoreError"),
        ("StoreTimeout", "DistStoreError"),
        ("QueueEmptyError", "DistStoreError"),
        ("StoreLost", "DistNetworkError"),
        ("StoreRefused", "DistNetworkError"),
        ("RendezvousError", "DistNetworkError"),
        ("RendezvousTimeout", "DistStoreError"),
    ],
)
def test_what_ranks_tell_each_other_is_caught_by_torchs_names(name, caught_as):
    import dure.torch_backend.create  # noqa: F401  # lazy: the tree before it is tested above

    for base in (getattr(errors, caught_as), getattr(torch_dist, caught_as), RuntimeError):
        with pytest.raises(base):
            raise getattr(errors, name)("it failed", rank=1)
    copy = pickle.loads(pickle.dumps(getattr(errors, name)("it failed", rank=1)))
    assert (type(copy).__name__, copy.rank) == (name, 1)
