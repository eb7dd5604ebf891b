"""The exception tree: who catches what."""

import copy
import pickle
import subprocess
import sys
import warnings

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
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes == set(errors.__all__)
    assert [name for name in errors.__all__ if getattr(dure, name, None) is None] == []


@pytest.mark.parametrize(
    ("name", "caught_as"),
    [
        ("UsageError", (ValueError, RuntimeError)),
        ("ShapeError", (ValueError, RuntimeError)),
        ("PlacementError", (ValueError, RuntimeError)),
        ("DimError", (errors.PlacementError, ValueError, RuntimeError, IndexError)),
        ("MeshError", (ValueError, RuntimeError, KeyError)),
        ("AxisError", (errors.MeshError, ValueError, RuntimeError, KeyError, IndexError)),
        ("DtypeError", (ValueError, RuntimeError, TypeError)),
        ("CopyError", (ValueError, RuntimeError, TypeError)),
        ("OptimizerError", (ValueError, RuntimeError, TypeError)),
        ("HookError", (errors.ModuleError, ValueError, RuntimeError, TypeError)),
    ],
)
def test_mistakes_are_caught_as_torchs_and_read_as_they_were_written(name, caught_as):
    error = getattr(errors, name)("it failed", rank=1, seen="this")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        for base in caught_as:
            with pytest.raises(base):
                raise one
        assert (str(one), one.rank) == ("it failed (rank 1): this", 1)
    error.advise("Do that.")
    assert str(error) == "it failed (rank 1): this. Do that."


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("DureDeprecationWarning", FutureWarning),
        ("UsageWarning", UserWarning),
        ("PerformanceWarning", UserWarning),
        ("UnwaitedWorkWarning", RuntimeWarning),
        ("ForkWarning", RuntimeWarning),
    ],
)
@pytest.mark.parametrize("caught_as", ["dure", "python"])
def test_warnings_obey_filters_for_dure_and_for_pythons_class(name, base, caught_as):
    ours = getattr(errors, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", dure.DureWarning if caught_as == "dure" else base)
        with pytest.raises(ours):
            warnings.warn("it is slow", ours, stacklevel=1)


def test_what_is_deprecated_names_its_successor_at_the_line_that_used_it():
    def old():
        errors.warn_deprecated("`x`", "`y`")

    with pytest.warns(dure.DureDeprecationWarning) as caught:
        old()
    (warning,) = caught
    assert str(warning.message) == "`x` is deprecated: use `y`"
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("options", "raised"),
    [
        (["error::dure.DureWarning"], ["UsageWarning", "PerformanceWarning"]),
        (["error::dure.PerformanceWarning"], ["PerformanceWarning"]),
        (["error::dure.DureWarning", "ignore::dure.UsageWarning"], ["PerformanceWarning"]),
        (["error::dure.DureWarning", "ignore"], []),
        (["ignore", "error::dure.UsageWarning"], ["UsageWarning"]),
    ],
)
def test_option_w_of_python_knows_the_classes(options, raised):
    program = """
import warnings, dure
for name in ("UsageWarning", "PerformanceWarning"):
    try:
        warnings.warn("it is slow", getattr(dure, name))
    except dure.DureWarning as e:
        print(type(e).__name__)
"""
    assert raised_with(options, program) == raised


def raised_with(options, program):
    # -E: without PYTHONPATH, as it is where Dure is installed.
    command = [sys.executable, "-E", *(f"-W{option}" for option in options), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("options", "raised"),
    [
        (["error::dure.DureWarning"], ["of Dure"]),
        (["error", "error::dure.DureWarning"], ["of Dure", "unknown"]),
        (["error::dure.DureWarning", "error::UserWarning"], ["of Dure", "unknown"]),
        (["error::dure.DureWarning", "error", "ignore::dure.DureWarning"], ["unknown"]),
        (["error::dure.DureWarning", "ignore::UserWarning"], []),
    ],
)
def test_option_w_of_python_comes_after_filters_of_the_program(options, raised):
    program = """
import warnings
warnings.filterwarnings("ignore", message="known")
import dure
for text, of in ("known", UserWarning), ("of Dure", dure.UsageWarning), ("unknown", UserWarning):
    try:
        warnings.warn(text, of)
    except UserWarning as e:
        print(text.replace(" ", "_"))
"""
    assert raised_with(options, program) == [text.replace(" ", "_") for text in raised]


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
    again = pickle.loads(pickle.dumps(getattr(errors, name)("it failed", rank=1)))
    assert (type(again).__name__, again.rank) == (name, 1)
