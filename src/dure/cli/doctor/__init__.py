"""`dure doctor`: looks at the machine, tries a small collective, and says what is wrong.

Every check is two functions. One *reads* what the machine shows into a plain value; the other
*judges* that value and returns `Finding`s, without looking at anything else, so that a test can
make up a machine. A check that fails, or takes too long, is a finding itself and ends no other.
"""

from dure.cli.doctor.command import doctor

__all__ = ["doctor"]
