"""Which part of a job this process is, as far as its environment says.

Slurm, the launchers of MPI, Kubernetes and torchrun set the same few values in variables of their
own: the number of processes and which one this is, or the number of hosts and which one this is,
and the name of the first host. `detect` reads them all into one value, a `Placement`. It is a pure
function of the variables passed in, and never fails: values that it cannot understand become notes,
not errors.

Internal: names here may change in any release, except for `actor_variables`.
"""

from dure.placement.actors import actor_variables
from dure.placement.detect import derived_port, detect
from dure.placement.nodes import expand_counts, expand_hosts
from dure.placement.reader import set_here
from dure.placement.value import NodeSlot, Placement, RankSlot, System

__all__ = [
    "NodeSlot",
    "Placement",
    "RankSlot",
    "System",
    "actor_variables",
    "derived_port",
    "detect",
    "expand_counts",
    "expand_hosts",
    "set_here",
]
