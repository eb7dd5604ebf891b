"""Where this process stands in a job, as far as its environment tells.

Slurm, the launchers of MPI, Kubernetes, SkyPilot and torchrun all say the same few things in
variables of their own: how many processes there are and which one this is, or how many hosts there
are and which one this is, and the name of the first host. `detect` reads them all into one value,
a `Placement`, and keeps for each number the variable it came from. It is a pure function of the
variables handed in, and total: what it cannot make sense of becomes a note, not an error.

Internal: names here may change in any release, except for `actor_variables`.
"""

from dure.placement.actors import actor_variables
from dure.placement.detect import derived_port, detect
from dure.placement.nodes import expand_counts, expand_hosts
from dure.placement.value import Member, NodeSlot, Placement, Reason, System
from dure.placement.variables import CLUSTER_VARIABLES, set_here

__all__ = [
    "CLUSTER_VARIABLES",
    "Member",
    "NodeSlot",
    "Placement",
    "Reason",
    "System",
    "actor_variables",
    "derived_port",
    "detect",
    "expand_counts",
    "expand_hosts",
    "set_here",
]
