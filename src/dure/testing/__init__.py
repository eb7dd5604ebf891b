"""Test tools for programs that use Dure: ranks as threads, pools of processes, a recorder."""

from dure.testing.pool import ProcessPool
from dure.testing.ranks import run_ranks
from dure.testing.recorder import CommRecorder

__all__ = ["CommRecorder", "ProcessPool", "run_ranks"]
