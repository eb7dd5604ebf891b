"""Several hosts: taking a seat in a cluster, and starting `dure run` on hosts over ssh.

* `take_seat`: from what was found around this process to the values of flags that are not given.
* `read_hosts`, `read_hostfile`: which hosts, and how many ranks each.
* `run_on_hosts`: the front of a job on several hosts; it starts an agent on each.
* `equivalent_lines`: the same job in the words of srun, mpirun, clush and torchrun.
"""

from dure.launch.clusters.seat import take_seat

__all__ = ["take_seat"]
