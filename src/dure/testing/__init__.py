"""Test tools for programs that use Dure: ranks as threads, and pools of real processes."""

from dure.testing.pool import ProcessPool
from dure.testing.ranks import run_ranks

__all__ = ["ProcessPool", "run_ranks"]
