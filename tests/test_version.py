"""The version of a build, of sources of every kind; and an engine that was built from others."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dure
from dure import version
from dure.version import PROTOCOL, RELEASE
from tests.arch.sources import ROOT, script


def test_the_version_is_the_releases_with_the_commit_that_was_built():
    assert dure.__version__ == version.VERSION
    if RELEASE.endswith(".dev0") and version.VERSION != RELEASE:
        built = re.escape(RELEASE[:-1]) + r"\d{8}\+g[0-9a-f]{8}(\.dirty)?"
        assert re.fullmatch(built, version.VERSION)


def version_of(root: Path) -> str:
    return script("scripts/build_version.py").version(root)


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    command = ("git", *settings, "-C", str(folder), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit, of 2026-02-01 in UTC and a day before in its zone."""
    root = tmp_path / "checkout"
    (root / "src/dure").mkdir(parents=True)
    (root / "src/dure/version.py").write_text('RELEASE = "0.3.0.dev0"\n')
    for name in (".git_archival.txt", ".gitattributes"):
        shutil.copy(ROOT / name, root)
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-31T23:30:00-0100")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_commit_has_one_version_in_a_clone_an_archive_and_an_sdist(
    checkout: Path, tmp_path: Path
):
    commit = git(checkout, "rev-parse", "HEAD")[:8]
    built = version_of(checkout)
    assert built == f"0.3.0.dev20260201+g{commit}"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    assert version_of(tmp_path / "shallow") == built
    (tmp_path / "archive").mkdir()
    git(checkout, "archive", "--output", str(tmp_path / "a.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "a.tar", tmp_path / "archive", filter="data")
    assert version_of(tmp_path / "archive") == built
    inner = checkout / "vendored"  # in a repository that is another project's
    (inner / "src/dure").mkdir(parents=True)
    shutil.copy(checkout / "src/dure/version.py", inner / "src/dure")
    assert version_of(inner) == "0.3.0.dev0"
    (inner / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: dure\nVersion: {built}\n")
    assert version_of(inner) == built


def test_changed_sources_are_dirty_and_a_release_is_what_is_written(checkout: Path):
    (checkout / "untracked").write_text("")
    built = version_of(checkout)
    file = checkout / "src/dure/version.py"
    file.write_text(file.read_text() + "\n")
    assert version_of(checkout) == f"{built}.dirty"
    file.write_text('RELEASE = "0.3.0"\n')
    assert version_of(checkout) == "0.3.0"


def test_settings_of_the_user_change_no_version(checkout: Path):
    built = version_of(checkout)
    git(checkout, "config", "log.showSignature", "true")
    git(checkout, "config", "log.decorate", "full")
    assert version_of(checkout) == built


def test_a_folder_of_another_user_is_read_by_git_that_heeds_the_home_alone(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built, real = version_of(checkout), shutil.which("git")
    old = tmp_path / "bin" / "git"
    old.parent.mkdir()
    old.write_text(
        "#!/bin/sh\n"
        f'grep -q "directory = *" "$HOME/.gitconfig" || exit 128\n'
        f'[ "$1" != -c ] || exit 128\n'
        f'exec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    assert version_of(checkout) == built


@pytest.mark.needs("engine")
@pytest.mark.parametrize("raised_by", [0, 1])
def test_an_engine_of_another_protocol_is_not_used(raised_by: int):
    program = f"""
from dure import version
version.PROTOCOL += {raised_by}
from dure import native
print(native.available()[1])
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if raised_by:
        assert (
            f"has protocol {PROTOCOL}, and the Python sources have protocol {PROTOCOL + 1}" in said
        )
    else:
        assert said == ""
