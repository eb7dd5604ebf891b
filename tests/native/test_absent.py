"""Where there is no engine, each of its names that Python cannot stand in for raises by name."""

import pytest

from dure import native
from dure.errors import UsageError
from dure.native import _absent

IN_PYTHON = {
    "Outcome", "Subject", "call_site", "copy_bytes", "copy_from_file", "crc32c", "kernel_isa",
    "know_torch", "not_copied_in_children", "reduce", "select_kernel_isa", "set_library_folders",
    "set_subject", "subject",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(_absent.__all__) - IN_PYTHON))
def test_what_needs_the_engine_raises_with_its_name(name):
    with pytest.raises(UsageError) as caught:
        getattr(_absent, name)(1, 2)
    assert f"dure.native.{name} " in caught.value.what
    assert caught.value.fix


def test_stand_ins_are_the_door_s_names():
    assert set(_absent.__all__) == set(native.__all__) - {"available", "require"}


def test_what_the_user_asked_for_is_named(monkeypatch):
    monkeypatch.setattr(native, "_reason", "this is a test")
    with pytest.raises(UsageError) as caught:
        native.require("dure.rpc")
    assert caught.value.what.startswith("dure.rpc ")
    assert caught.value.seen == "this is a test"
    assert native.available() == (False, "this is a test")
