"""Optimizers whose work and state are divided over the ranks.

`zero` holds the class users take; `partition` says who updates what, `exchange` how new values
get to the others, `sharing` how the ranks of a host have one copy of the parameters instead;
`states` brings the parts of the state together.
"""

from __future__ import annotations

from dure.parallel.optim.zero import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
