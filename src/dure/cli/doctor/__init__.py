"""`dure doctor`: looks at the machine, tries a small collective, and says what is wrong.

`machine` reads what the machine shows, and `checks` judges such values without looking at anything
else, so that a test can make up a machine. `collectives` (with `rank`) and `hosts` start processes
here and elsewhere; `command` runs all of it. A check that fails, or takes too long, is a finding
itself and ends no other.
"""

from dure.cli.doctor.command import doctor

__all__ = ["doctor"]
