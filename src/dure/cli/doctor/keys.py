"""The job key's files: nobody else may read them, or change what lies around them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.cli.doctor.finding import Finding, fine, problem, warning
from dure.store.key import KEY_BYTES, user_key_path

__all__ = ["KeyFile", "Keys", "judge", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """What is known of one file; `mode` and `folder_mode` are permission bits."""

    path: str
    exists: bool
    mode: int = 0
    owner: int = 0
    num_bytes: int = KEY_BYTES
    folder_mode: int = 0o700
    folder_owner: int = 0
    named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The files, who asks, and whether DURE_INSECURE is set."""

    files: tuple[KeyFile, ...]
    user: int
    insecure: bool = False


def read() -> Keys:
    """Look at the user's own key file, and at the one that DURE_JOB_KEY_FILE names."""
    files = [_look(user_key_path(), named=False)]
    named = env.text("DURE_JOB_KEY_FILE")
    if named is not None:
        files.append(_look(Path(named), named=True))
    return Keys(files=tuple(files), user=os.getuid(), insecure=env.flag("DURE_INSECURE"))


def _look(path: Path, *, named: bool) -> KeyFile:
    try:
        file, folder = path.stat(), path.parent.stat()
    except OSError:
        return KeyFile(path=str(path), exists=False, named=named)
    return KeyFile(
        path=str(path),
        exists=True,
        mode=stat.S_IMODE(file.st_mode),
        owner=file.st_uid,
        num_bytes=file.st_size,
        folder_mode=stat.S_IMODE(folder.st_mode),
        folder_owner=folder.st_uid,
        named=named,
    )


def judge(keys: Keys) -> list[Finding]:
    """Say whether the key is a secret."""
    found = [finding for file in keys.files for finding in _judge_file(file, keys.user)]
    if keys.insecure:
        found.append(
            warning(
                "job key",
                "DURE_INSECURE is set: whoever reaches the store's port can join a job",
                "Unset it; `dure run` mints a key for each job by itself.",
            )
        )
    return found


def _judge_file(file: KeyFile, user: int) -> list[Finding]:
    if not file.exists:
        if not file.named:
            return [fine("job key", "no key of your own yet; it is made on first use")]
        advice = "Copy the key there (mode 0600), or unset the variable."
        return [problem("job key", f"DURE_JOB_KEY_FILE names {file.path}: no such file", advice)]
    if file.owner != user:
        advice = f"chown it, or remove it: {file.path}"
        return [problem("job key", f"{file.path} belongs to another user ({file.owner})", advice)]
    if file.mode & 0o077:
        seen = f"{file.path} has mode {file.mode:04o}: others can read or change it"
        advice = f"Remove it, since it is known now, and let a new one be made: rm {file.path}"
        return [problem("job key", seen, advice)]
    if file.folder_mode & 0o022 and not file.folder_mode & stat.S_ISVTX:
        seen = f"others can write to {Path(file.path).parent}, and so replace the key"
        return [problem("job key", seen, f"chmod go-w {Path(file.path).parent}")]
    return [fine("job key", f"{file.path}, mode {file.mode:04o}")]
