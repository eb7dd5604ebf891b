"""Ranks that train by themselves and meet now and then: the mean of models in place of gradients.

A step without communication costs nothing between hosts, and ranks that see different data drift
apart. Three ways to bring them together again:

* *Averaging* (averagers.py): every so many steps the parameters become their mean over the ranks;
  in a hierarchy, over few ranks often and over all of them rarely. With DDP inside a host until
  then this is post-local SGD (post_local.py; the hook that keeps DDP inside the host is
  `dure.parallel.ddp.hooks.post_localSGD_hook`).
* *An outer optimizer* (diloco.py): the average movement of the ranks is taken for a gradient,
  and a second optimizer, with momentum, makes a step with it. It tolerates hundreds of local steps.

packing.py makes few large all_reduces of many parameters.
"""

from __future__ import annotations

from dure.parallel.averaging.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from dure.parallel.averaging.diloco import DiLoCo
from dure.parallel.averaging.packing import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from dure.parallel.averaging.post_local import PostLocalSGDOptimizer

__all__ = [
    "DiLoCo",
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
