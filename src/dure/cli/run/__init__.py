"""`dure run`, in the order in which a command line passes through it.

`flag` and `flags`, with `flags_hosts` and `flags_output` (what there is), `values` (what a text means), `parse` (which values were given),
`request` (what they mean together), `command` (doing it). `page` shows the table of flags.
"""

from dure.cli.run.command import run

__all__ = ["run"]
