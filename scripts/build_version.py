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

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = re.compile(r'^RELEASE = "(.+)"$', re.MULTILINE)
STATED = re.compile(r"^Version: (.+)$", re.MULTILINE)
COMMIT = re.compile(r"^([0-9a-f]{40,}) ([0-9]+)$")
READ_ALL = '[safe]\n\tdirectory = *\n\tdirectory = "{}"\n'
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
    commit = COMMIT.match(_committed(root) if in_checkout else _archived(root))
    if commit is None:
        return release
    day = datetime.fromtimestamp(int(commit[2]), UTC).strftime("%Y%m%d")
    changed = in_checkout and _git(root, "status", "--porcelain", "--untracked-files=no")
    dirty = ".dirty" if changed else ""
    return f"{release[:-1]}{day}+g{commit[1][:DIGITS]}{dirty}"


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; "" if it cannot be run or does not know the folder.

    In a container the folder may belong to another user, and git would refuse to read it. Versions
    of git before 2.38 take the permission only from a file in the user's home.
    """
    with tempfile.TemporaryDirectory() as home:
        path = str(root.resolve()).replace("\\", "\\\\").replace('"', '\\"')
        (Path(home) / ".gitconfig").write_text(READ_ALL.format(path))
        variables = {name: v for name, v in os.environ.items() if name != "GIT_CONFIG_GLOBAL"}
        variables |= {"HOME": home, "XDG_CONFIG_HOME": home}
        command = ["git", "-C", str(root), *arguments]
        try:
            ended = subprocess.run(
                command, env=variables, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
        return ended.stdout.strip()


def _committed(root: Path) -> str:
    """Return the commit and its time; `git log` would add what the user's settings ask for."""
    time, _, commit = _git(root, "rev-list", "--max-count=1", "--timestamp", "HEAD").partition(" ")
    return f"{commit} {time}"


def _archived(root: Path) -> str:
    path = root / ".git_archival.txt"
    return path.read_text().strip() if path.exists() else ""


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """Provide the version to scikit-build-core."""
    return {"version": version()}


if __name__ == "__main__":
    print(version())
