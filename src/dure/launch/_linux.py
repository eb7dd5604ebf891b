"""Imported before all else of the package: it says by name that launching is for Linux.

The launcher stands on pidfds, control groups, /proc and real-time signals. Elsewhere any of these
would be missing at some line, with an error that tells nothing.
"""

import sys

from dure.errors import UsageError

if sys.platform != "linux":
    raise UsageError(
        "dure.launch (`dure run`, `dure.spawn`) is for Linux",
        seen=f"this is {sys.platform}",
        fix="Plan and test here (`dure plan`, dure.testing), and start jobs on Linux.",
    )
