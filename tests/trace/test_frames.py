"""Frames: the user's and those of libraries."""

from __future__ import annotations

import sysconfig

import torch

from dure.launch.ranks import child
from dure.testing import pool
from dure.trace.frames import is_library, user_frame

STANDARD = f"{sysconfig.get_path('stdlib')}/threading.py"


def test_file_below_a_folder_called_dure_is_the_users() -> None:
    elsewhere = ("/usr/lib/python3.12/threading.py", "/opt/lib/python3.12/site-packages/torch/a.py")
    library = (child.__file__, torch.__file__, STANDARD, "<frozen importlib._bootstrap>")
    assert all(map(is_library, (*elsewhere, *library)))
    assert not any(map(is_library, ("/home/me/dure/examples/train.py", "/home/me/torch/train.py")))
    installed = "/opt/lib/python3.12/site-packages/zmq/poll.py"
    assert not any(map(is_library, (pool.__file__, installed)))


def test_program_comes_before_installed_packages_and_those_before_nothing() -> None:
    installed = "/opt/lib/python3.12/site-packages/zmq/poll.py"
    assert user_frame([STANDARD, installed, "/home/me/train.py", "/home/me/main.py"]) == 2
    assert user_frame([STANDARD, installed, child.__file__]) == 1
    assert user_frame([STANDARD, child.__file__]) is None
