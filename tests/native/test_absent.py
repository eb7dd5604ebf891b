"""Where there is no engine, each of its names that Python cannot stand in for raises by name."""

import subprocess
import sys

import pytest

from dure import native
from dure.errors import UsageError
from dure.native import _absent

IN_PYTHON = {
    "Outcome", "Subject", "call_site", "copy_bytes", "copy_from_file", "crc32c", "kernel_isa",
    "know_torch", "not_copied_in_children", "reduce", "select_kernel_isa", "set_library_folders",
    "set_subject", "subject",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(native.__all__) - {"available", "require"} - IN_PYTHON))
def test_what_needs_the_engine_raises_with_its_name(name):
    with pytest.raises(UsageError) as caught:
        getattr(_absent, name)(1, 2)
    assert f"dure.native.{name} " in caught.value.what
    assert caught.value.fix


def test_an_engine_without_some_names_is_not_used():
    program = """
import sys, types
from dure.version import PROTOCOL
engine = sys.modules["dure.native._engine"] = types.ModuleType("dure.native._engine")
engine.protocol, engine.reduce = PROTOCOL, max
from dure import native
print(native.available()[1])
assert native.reduce is not max and native.crc32c(b"123456789") == 0xE3069283
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "it does not have Channel, Group" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_an_extension_that_was_not_built_is_named():
    program = """
import sys
class NotBuilt:
    def find_spec(name, path=None, target=None):
        if name == "dure.native._engine":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotBuilt)
from dure import native
print(native.available()[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("No module named 'dure.native._engine'\n"), done.stderr


def test_what_the_user_asked_for_is_named(monkeypatch):
    monkeypatch.setattr(native, "_reason", "this is a test")
    with pytest.raises(UsageError) as caught:
        native.require("dure.rpc")
    assert caught.value.what.startswith("dure.rpc ")
    assert caught.value.seen == "this is a test"
    assert native.available() == (False, "this is a test")
