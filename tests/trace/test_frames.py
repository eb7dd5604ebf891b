"""Frames: the user's and those of libraries."""

from __future__ import annotations

from dure.launch.ranks import child
from dure.trace.frames import is_library


def test_file_below_a_folder_called_dure_is_the_users() -> None:
    library = ("/usr/lib/python3.12/threading.py", "/opt/lib/python3.12/site-packages/zmq/poll.py")
    assert all(map(is_library, (child.__file__, *library)))
    assert not any(map(is_library, ("/home/me/dure/examples/train.py", "/home/me/torch/train.py")))
