"""`dure run`, in the order in which a command line passes through it.

`flags` (what there is), `values` (what a text means), `parse` (which values were given), `request`
(what they mean together), `command` (doing it), `fleet` (doing it on other hosts). `page` shows the
table of flags.
"""

from dure.cli.run.command import run

__all__ = ["run"]
