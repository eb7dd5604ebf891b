"""The key shows nowhere: a whole job is searched for it, in every form in which it could be told.

The job crashes with the key within reach: in local variables, in an error's fields, in flight
records. Its processes, its output and all that it leaves behind are searched.
"""

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from zmq.utils import z85

import dure.store
from dure.launch.spec import JobSpec
from dure.store import JobKey
from dure.store.key import mint
from tests.launch.procs.launching import Launching
from tests.waiting import key_file, until

PROGRAM = """
import logging, os, sys, traceback
import dure
from dure.store.key import load_for
logging.basicConfig(level=logging.DEBUG)
key = load_for("localhost")
pair = key.pair("store client")
print("I have", key, repr(pair), vars(sys.modules["__main__"]).keys(), flush=True)
dure.init_process_group("gloo" if os.environ.get("GLOO") else None)
dure.barrier()
store_repr = repr(dure.store.TCPStore)
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
sys.stdin.read() if os.environ["RANK"] == "0" else dure.barrier()
def fail(key, pair):
    deep = {"key": key, "pair": pair, "all": dict(os.environ)}
    try:
        raise ValueError(key, pair, deep)
    except ValueError:
        trace = traceback.TracebackException(*sys.exc_info(), capture_locals=True)
        print("".join(trace.format()), flush=True)
        raise
fail(key, pair)
"""


def forms_of(key: JobKey) -> dict[str, bytes]:
    """All ways to write the key, and the secret keys that are made from it."""
    secrets = {"key": key.raw}
    for purpose in ("store server", "store client"):
        secrets[purpose] = z85.decode(key.pair(purpose).secret)
    forms: dict[str, bytes] = {}
    for name, raw in secrets.items():
        forms |= {
            f"{name}, raw": raw,
            f"{name}, clamped": raw[1:-1],  # arithmetic on the curve changes the ends
            f"{name}, hex": raw.hex().encode(),
            f"{name}, HEX": raw.hex().upper().encode(),
            f"{name}, base64": base64.b64encode(raw).rstrip(b"="),
            f"{name}, base64 of URLs": base64.urlsafe_b64encode(raw).rstrip(b"="),
            f"{name}, Z85": z85.encode(raw),
            f"{name}, Python": repr(raw)[2:-1].encode(),
            f"{name}, decimal": b", ".join(b"%d" % byte for byte in raw),
        }
    return forms


def found_in(text: bytes, key: JobKey) -> list[str]:
    return [name for name, form in forms_of(key).items() if form in text]


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def seen_from_outside(processes: list[psutil.Process]) -> Iterator[tuple[str, bytes]]:
    for process in processes:
        for name in ("cmdline", "environ", "comm", "maps"):
            try:
                yield f"{name} of {process.pid}", Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:
                continue


@pytest.fixture(scope="module")
def key() -> JobKey:
    return mint()


def test_a_job_shows_its_key_nowhere(key: JobKey, job: Launching, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "secret").mkdir(0o700)
    keyfile = key_file(tmp_path / "secret" / "key", key.raw)
    logs, traces = tmp_path / "logs", tmp_path / "traces"
    for name, form in forms_of(key).items():
        assert name in found_in(b"before " + form + b" after", key)
    assert not found_in(repr(JobSpec(program="x", key=key.raw)).encode(), key)
    started = job.start(
        *("--nproc", "2", "--key-file", keyfile, "--log-dir", logs, job.write(PROGRAM), here),
        env={"DURE_TRACE_DIR": str(traces), "PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.PIPE,
    )
    until(lambda: len(os.listdir(here)) == 2, "the ranks")
    processes = family(psutil.Process(started.pid))
    assert len(processes) >= 3
    for where, text in seen_from_outside(processes):
        assert not found_in(text, key), where
    ended = job.finish(started)
    said = (ended.out + ended.err).encode()
    assert ended.code
    assert f"JobKey(fingerprint={key.fingerprint})".encode() in said
    assert b"capture_locals" in said or b"deep = " in said
    assert not found_in(said, key)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path != keyfile]
    assert any(logs in path.parents for path in kept)
    assert any(traces in path.parents for path in kept)
    assert logs.stat().st_mode & 0o777 == 0o700
    assert traces.stat().st_mode & 0o777 == 0o700
    for path in kept:
        assert not found_in(path.read_bytes(), key), path


def test_the_store_neither_unpickles_nor_evaluates() -> None:
    """Nor does what it imports of ours: with these modules alone, a server runs."""
    code = (
        "import sys, dure.store, dure.store.server\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'dure'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = {Path(name) for name in out.stdout.split()}
    files |= set(Path(dure.store.__file__).parent.glob("*.py"))
    assert len(files) > 25
    imports = r"^ *(import|from) +(pickle|_pickle|dill|cloudpickle|marshal|shelve|yaml)\b"
    calls = (
        r"(?<![.\w])(eval|exec|compile|__import__)\(|\b(recv_pyobj|send_pyobj|recv_serialized)\b"
    )
    found = {
        f"{path.name}: {line}"
        for path in files
        for line in path.read_text().splitlines()
        if re.search(imports, line) or (path.parent.name == "store" and re.search(calls, line))
    }
    assert not found
    assert not {path.parent.name for path in files} & {"comm", "parallel", "launch"}
