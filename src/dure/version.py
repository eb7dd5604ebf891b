"""Which build of Dure this is, and what the processes of a job compare when they meet.

A *build* is a version and a protocol. Processes of one job must have equal builds, since only
processes of one version are tested together. Builds are compared at every rendezvous, in messages
that are exchanged anyway (`dure.store.builds`).

A version that is not released yet carries the day and the commit that it was built from:
`0.2.0.dev20261128+g5d4b20e5`. Installing writes it into the module `dure._build`, so no process
runs git. In a checkout that was never installed the module is missing; the version is `RELEASE`.

Internal: names here may change in any release. The version is `dure.__version__`.
"""

from __future__ import annotations

RELEASE = "0.2.0.dev0"
"""The version, written by hand here and nowhere else. One that ends in `.dev0` is not released yet:
`scripts/build_version.py` replaces the 0 by the day and adds the commit."""

PROTOCOL = 11
"""Raised by one when what processes of a job send each other, or share, changes so that older ones
would not understand it: messages of the rendezvous, of stores, launchers and RPC, the layout of the
native engine's shared memory (csrc/core/layout.h, which is compiled with this number)."""

try:
    from dure._build import VERSION as _built  # pyright: ignore
except ImportError:
    _built = RELEASE

VERSION: str = _built
"""The version of this build."""

__version__ = VERSION
