"""Several hosts: taking a seat in a cluster, and starting `dure run` on hosts over ssh.

* `take_seat`: from what was found around this process to the values of flags that are not given.
* `read_hosts`, `read_hostfile`: which hosts, and how many ranks each.
* `run_on_hosts`: the front of a job on several hosts; it starts an agent on each.
* `equivalent_lines`: the same job in the words of srun, mpirun, clush and torchrun.
"""

from dure.launch.clusters.commands import Fleet
from dure.launch.clusters.equivalents import Section, equivalent_lines
from dure.launch.clusters.front import run_on_hosts
from dure.launch.clusters.hosts import Slots, read_hostfile, read_hosts
from dure.launch.clusters.leash import hold_leash
from dure.launch.clusters.meeting import meeting_host
from dure.launch.clusters.seat import Taken, take_seat

__all__ = [
    "Fleet",
    "Section",
    "Slots",
    "Taken",
    "equivalent_lines",
    "hold_leash",
    "meeting_host",
    "read_hostfile",
    "read_hosts",
    "run_on_hosts",
    "take_seat",
]
