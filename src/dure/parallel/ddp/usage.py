"""Which parameters go unused, step after step: is the graph static, is the search for them needed?

``find_unused_parameters`` costs a look at every parameter in every backward. A program that passes
it and uses all parameters in its first step is told so, once. A graph whose unused parameters are
always the same could have been declared static (torch's logging data say so).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

__all__ = ["Usage"]


class Usage:
    """What the steps so far have shown.

    Attributes:
        is_static: All steps left the same parameters unused.
    """

    def __init__(self) -> None:
        self.is_static = True
        self._unused_before: list[int] | None = None
        self._needless = False

    def note(self, unused: Sequence[int], searched: bool) -> None:
        """Take in the numbers of a step's unused parameters; `searched`: a graph that changes."""
        if self._unused_before is None:
            self._unused_before = list(unused)
            self._needless = searched and not unused
        elif unused != self._unused_before:
            self.is_static = False

    def warn_once(self) -> None:
        """Warn, at the begin of the second forward, of a search that finds nothing."""
        if self._needless:
            self._needless = False
            warnings.warn(
                "find_unused_parameters=True, but the first step used all parameters: leave it "
                "out, unless later steps use fewer",
                stacklevel=4,
            )
