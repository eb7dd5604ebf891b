"""`dure run`: from the command line to the job.

`flags` lists the flags, `values` reads their texts, `parser` the command line; `request` makes a
`JobSpec` of the values, and this module runs it, or `over_ssh` on other hosts.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dure import env
from dure.cli.run.flags import run_parser
from dure.cli.run.request import RunRequest, make_request
from dure.errorfile import RecordedError, write_error
from dure.errors import StoreError, UsageError
from dure.launch import JobResult, JobSpec, run_job
from dure.launch.clusters.control_stream import code_for_ssh, follow_control_stream
from dure.launch.clusters.node_slot import take_node_slot
from dure.launch.program import check_output
from dure.launch.ranks.errorfiles import recorded
from dure.placement.detect import detect
from dure.trace import logs, telemetry


def run(words: list[str]) -> int:
    """Run `dure run WORDS`, and return the exit code.

    Raises:
        UsageError: The user's mistake, in one line.
    """
    parser = run_parser()
    given = parser.parse(words)
    env.check_flags()
    logs.configure()
    variables = parser.parse_variables(env.everything())
    for note in (parser.misplaced(given), env.unknown_note()):
        if note:
            _print_note(note)
    request = make_request(given, variables, _found({**variables, **given.values}))
    if request.dry_run or request.hosts is not None or request.hostfile is not None:
        from dure.cli.run.over_ssh import start_elsewhere  # lazy: most jobs have one host

        return start_elsewhere(dataclasses.replace(request, spec=_with_key(request)))
    spec = prepared_spec(request)
    if request.leash:
        follow_control_stream(sys.stdin.fileno(), spec.grace_s)
        spec = dataclasses.replace(spec, stdin="none")
    _show_warnings()
    result = _run_with_page(request, spec) if request.page else _run_job(request, spec)
    _record_failure(result)
    return code_for_ssh(result.exit_code) if request.leash else result.exit_code


def _run_with_page(request: RunRequest, spec: JobSpec) -> JobResult:
    from dure.cli.page import shown_on_page  # lazy: most jobs have none

    with shown_on_page(spec) as (shown, page):
        result = _run_job(request, shown)
        page.conclude(result)
    return result


def _run_job(request: RunRequest, spec: JobSpec) -> JobResult:
    with telemetry.launch_span(spec.program, spec.nproc) as variables:
        return _run_with_metrics(
            request, dataclasses.replace(spec, env={**spec.env, **variables}) if variables else spec
        )


def _run_with_metrics(request: RunRequest, spec: JobSpec) -> JobResult:
    if request.metrics_port is None:
        return run_job(spec)
    from dure.launch.metrics import served_metrics  # lazy: most jobs have none

    with served_metrics(spec, request.metrics_port) as served:
        return run_job(served)


def _show_warnings() -> None:
    """Show warnings of the launcher's store as the launcher's other lines are shown."""
    log = logging.getLogger("dure")
    if not log.hasHandlers():  # otherwise the program shows them
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dure] %(message)s"))
        handler.handleError = lambda record: None  # the output is closed
        handler.setLevel(logging.WARNING)
        log.addHandler(handler)


def _found(chosen: Mapping[str, object]) -> dict[str, object]:
    """Return the values that the cluster around this process fills in, and print which."""
    placement = detect(env.everything())
    taken = take_node_slot(placement, chosen)
    if taken.line:
        _print_note(taken.line)
    values = dict(taken.values)
    if "endpoint" in values:
        from dure.launch.clusters.meeting import outward  # lazy: before the zygote starts

        values["endpoint"] = outward(str(values["endpoint"]), placement.hosts)
    return values


def _with_key(request: RunRequest) -> JobSpec:
    if request.key_stdin:
        return dataclasses.replace(request.spec, key=_key_line())
    if request.key_file is None:
        return request.spec
    from dure.store.key import key_from_file  # lazy: before the zygote starts

    try:
        key = key_from_file(request.key_file)
    except StoreError as error:
        raise UsageError(error.what, seen=error.seen, fix=error.fix) from None
    return dataclasses.replace(request.spec, key=key.raw)


def prepared_spec(request: RunRequest) -> JobSpec:
    """Fill in the key, and a directory for files if one is needed."""
    spec = _with_key(request)
    files = spec.redirects or spec.tee or spec.stdout_filters or spec.stderr_filters
    if spec.log_dir is None and files:
        check_output(spec)  # a job that is refused leaves no directory
        directory = Path(tempfile.mkdtemp(prefix="logs_dure_"))
        _print_note(f"the ranks' streams are kept in {directory}")
        spec = dataclasses.replace(spec, log_dir=directory)
    return spec


def _record_failure(result: JobResult) -> None:
    """Write the first failure into the file that the launcher of this launcher reads, if any."""
    file, failure = env.text("TORCHELASTIC_ERROR_FILE"), result.first_failure
    if file is None or failure is None or result.ok:
        return
    if failure.crash is not None:
        error = recorded(failure.crash)
    else:
        error = RecordedError(
            message=f"rank {failure.rank} on {failure.host} failed: {failure.exit}",
            exit_code=failure.status,
        )
    try:
        write_error(Path(file), error)
    except OSError as trouble:
        _print_note(f"{file} cannot be written: {trouble.strerror}")


def _key_line() -> bytes:
    """Read the first line of the standard input, and not a byte more: the rest is rank 0's."""
    from dure.store.key import KEY_BYTES  # lazy: before the zygote starts

    line = b""
    while not line.endswith(b"\n") and len(line) <= 2 * KEY_BYTES:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    if not re.fullmatch(rb"[0-9a-fA-F]{%d}\n?" % (2 * KEY_BYTES), line):
        raise UsageError(
            "--key-stdin did not find a key",
            seen=f"{len(line)} bytes on the first line of the standard input",
            fix=f"Give {2 * KEY_BYTES} hexadecimal digits and a newline.",
        )
    return bytes.fromhex(line.decode())


def _print_note(text: str) -> None:
    print(f"[dure] {text}", file=sys.stderr, flush=True)
