"""Test tools for programs that use Dure: ranks as threads, pools of processes, a recorder."""

from typing import TYPE_CHECKING

from dure.testing.pool import ProcessPool
from dure.testing.ranks import run_ranks
from dure.testing.recorder import CommRecorder

__all__ = ["CommRecorder", "ProcessPool", "run_ranks"]

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.testing import accelerator as accelerator
    # isort: on
    # fmt: on
