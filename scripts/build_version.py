#!/usr/bin/env python3
"""The version of what is built from this folder; pyproject.toml names this file as its provider.

    scripts/build_version.py       print it

A version in src/dure/version.py that ends in `.dev0` is not released yet. A build of it gets the
commit's day (UTC) in the place of the 0, and the commit: `0.2.0.dev20261128+g5d4b20e5`. `.dirty`
follows if tracked files were changed. Day and commit are the same in a shallow clone, an archive
and a full clone. They are taken from the first of these that there is:

1. PKG-INFO, in an sdist, has the complete version;
2. git, in a checkout;
3. .git_archival.txt, in an archive that `git archive` or a forge made of a commit.

Without any of them the version stays as it is written.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = re.compile(r'^RELEASE = "(.+)"$', re.MULTILINE)
STATED = re.compile(r"^Version: (.+)$", re.MULTILINE)
COMMIT = re.compile(r"^([0-9a-f]{40,}) ([0-9]+)$")
DIGITS = 8


def version(root: Path = ROOT) -> str:
    """Return the version of a build of the sources in `root`."""
    found = WRITTEN.search((root / "src/dure/version.py").read_text())
    assert found is not None, "src/dure/version.py has no RELEASE"
    release = found[1]
    if not release.endswith(".dev0"):
        return release
    info = root / "PKG-INFO"
    if info.exists():
        stated = STATED.search(info.read_text())
        assert stated is not None, "PKG-INFO has no version"
        return stated[1]
    in_checkout = (root / ".git").exists()
    commit = COMMIT.match(
        _git(root, "log", "-1", "--format=%H %ct") if in_checkout else _archived(root)
    )
    if commit is None:
        return release
    day = datetime.fromtimestamp(int(commit[2]), UTC).strftime("%Y%m%d")
    changed = in_checkout and _git(root, "status", "--porcelain", "--untracked-files=no")
    dirty = ".dirty" if changed else ""
    return f"{release[:-1]}{day}+g{commit[1][:DIGITS]}{dirty}"


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; "" if it cannot be run or does not know the folder."""
    # In a container the folder may belong to another user, and git would refuse to read it.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _archived(root: Path) -> str:
    path = root / ".git_archival.txt"
    return path.read_text().strip() if path.exists() else ""


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """Provide the version to scikit-build-core."""
    return {"version": version()}


if __name__ == "__main__":
    print(version())
