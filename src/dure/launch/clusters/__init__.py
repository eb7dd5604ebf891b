"""Several hosts: taking a slot in a cluster, and starting `dure run` on hosts over ssh.

* `node_slot`: from what was found around this process to the values of flags that are not given.
* `hosts`: which hosts, and how many ranks each.
* `commands`: the command for each of them, and its standard input.
* `ssh_launcher`: it starts an agent on each host and shows what they write; `control_stream`: the
  other end.
* `meeting`: the address at which the hosts rendezvous.

Nothing is imported here, because most jobs have one host and need only `node_slot`.
"""
