"""Several hosts: taking a seat in a cluster, and starting `dure run` on hosts over ssh.

* `seat`: from what was found around this process to the values of flags that are not given.
* `hosts`: which hosts, and how many ranks each.
* `commands`: what is said to each of them, on which stream.
* `front`: it starts an agent on each host and shows what they write; `leash`: the other end.
* `meeting`: where the hosts meet.

Nothing is imported here, for most jobs have one host and need `seat` alone.
"""
