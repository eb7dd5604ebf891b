"""The build of Dure, which the processes of a job compare at their rendezvous.

A *build* is a version and a protocol. The processes of a job must have equal builds, because only
processes of one version are tested together. They compare builds at every rendezvous, in messages
that are exchanged anyway (`dure.store.builds`).

An unreleased version has the day and the commit of its sources: `0.3.0.dev20261201+g5d4b20e5`.
Installing writes it into the module `dure._build`, so no process runs git. A checkout that was
never installed does not have this module; its version is `RELEASE`.

Internal: names here may change in any release. The version is `dure.__version__`.
"""

from __future__ import annotations

RELEASE = "0.3.0.dev0"
"""The version; this is the only place to change it. `.dev0` marks an unreleased version, for which
`scripts/build_version.py` replaces the 0 by the day and adds the commit."""

PROTOCOL = 17
"""Increased by one with each incompatible change of the data that processes of a job exchange or
share: messages of rendezvous, stores, launchers and RPC, and the layout of the native engine's
shared memory (csrc/core/layout.h, which is compiled with this number)."""

OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.15"
"""The minor versions of torch that the tests have passed with; pyproject.toml has the same."""

try:
    from dure._build import VERSION as _built  # pyright: ignore
except ImportError:
    _built = RELEASE

VERSION: str = _built
"""The version of this build."""

__version__ = VERSION
