"""Imported before all else of the package: it reports that launching needs Linux.

The launcher needs pidfds, control groups, /proc and real-time signals. On another system the first
of these that is used would raise an error that does not name the reason.
"""

import sys

from dure.errors import UsageError

if sys.platform != "linux":
    raise UsageError(
        "dure.launch (`dure run`, `dure.spawn`) is for Linux",
        seen=f"this is {sys.platform}",
        fix="Plan and test here (`dure plan`, dure.testing), and start jobs on Linux.",
    )
