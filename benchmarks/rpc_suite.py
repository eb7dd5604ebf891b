"""torch's own tests of RPC, which ship in its package, run with TensorPipe and with Dure.

    python benchmarks/rpc_suite.py --agent tensorpipe --write
    python benchmarks/rpc_suite.py --agent dure --write [--only RpcTest] [--part 1/4]
    python benchmarks/rpc_suite.py --table

TensorPipe crashes at times in cases that it passes at others: with `--failed` those that have
failed are run again, and a case that passes once counts as one that it passes.

Each case runs in processes of its own, as many as it asks for, with a time limit. For Dure, the
names `torch.distributed.rpc`, `torch.distributed.autograd`, `DistributedOptimizer` and
`RemoteModule` are bound to Dure's before the tests are imported; the tests of DDP also get its
process groups and its DDP.
The exit code is 1 if a case that was run has failed.
What is left out, and why, is in `rpc_left_out.txt`; outcomes are kept in `results/rpc_suite.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.rpc

from dure.cli.machine import conditions
from dure.errors import RpcError
from dure.native import Outbox
from dure.rpc.agent import RpcAgent
from dure.rpc.codec import Codec
from dure.rpc.current import current
from dure.rpc.message import MessageType, RpcMessage
from dure.rpc.rref import RRef

LEFT_OUT = Path(__file__).with_name("rpc_left_out.txt")
RESULTS = Path(__file__).parent / "results" / "rpc_suite.json"
AGENTS = ("tensorpipe", "dure")

BOUND = {
    "rpc": "rpc",
    "rpc.api": "rpc",
    "rpc.backend_registry": "rpc.backend_registry",
    "rpc.functions": "rpc.functions",
    "rpc.internal": "rpc",
    "rpc.options": "rpc.backend_registry",
    "autograd": "autograd",
    "optim": "rpc.optimizer",
    "nn": "rpc.remote_module",
    "nn.api.remote_module": "rpc.remote_module",
}
"""Below torch.distributed: the module of Dure that answers in its place."""

PRIVATE = {
    "rpc": {"PyRRef", "TensorPipeAgent", "constants"},
    "rpc.api": {
        "_delete_all_user_and_unforked_owner_rrefs",
        "_thread_local_var",
        "_use_rpc_pickler",
    },
    "rpc.internal": {
        "_build_rpc_profiling_key",
        "_internal_rpc_pickler",
        "_InternalRPCPickler",
        "PythonUDF",
        "RPCExecMode",
    },
    "nn.api.remote_module": {"_REMOTE_MODULE_PICKLED_ATTRIBUTES", "_RemoteModule"},
}
"""Names that the tests' modules import, for cases that are left out: these stay torch's."""


class StandIn(types.ModuleType):
    """A module of torch's whose names are Dure's."""

    def __init__(self, name: str, own: str) -> None:
        super().__init__(f"torch.distributed.{name}")
        self.__dict__["_theirs"] = sys.modules[f"torch.distributed.{name}"]
        self.__dict__["_own"] = own
        self.__dict__["_private"] = PRIVATE.get(name, set())
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name in self._private:
            return getattr(self._theirs, name)
        return getattr(importlib.import_module(f"dure.{self._own}"), name)


def bind_dure() -> None:
    """Let what is imported from now on find Dure's RPC where it looks for torch's."""
    for name, own in BOUND.items():
        importlib.import_module(f"torch.distributed.{name}")
        importlib.import_module(f"dure.{own}")
    for name, own in BOUND.items():
        stand_in = StandIn(name, own)
        parent, _, last = f"torch.distributed.{name}".rpartition(".")
        if name == "rpc.internal":
            stand_in.__dict__["serialize"] = lambda value: Codec(RRef).pack((value,), 0)
        sys.modules[f"torch.distributed.{name}"] = stand_in
        setattr(sys.modules[parent], last, stand_in)


class Fixture:
    """What the tests ask about the agent that they run with.

    A group of torch's that a test makes meets in the file that the test names; Dure's RPC, whose
    files are of another kind, in one beside it.
    """

    beside = ""

    @property
    def rpc_backend(self) -> Any:
        """The kind of agent."""
        return torch.distributed.rpc.backend_registry.BackendType["TENSORPIPE"]

    @property
    def rpc_backend_options(self) -> Any:
        """What `init_rpc` gets."""
        registry = torch.distributed.rpc.backend_registry
        return registry.construct_rpc_backend_options(
            self.rpc_backend,
            init_method=self.init_method + self.beside,  # type: ignore[attr-defined]
        )

    def get_shutdown_error_regex(self) -> str:
        """Return what an error says when the other side has shut down."""
        return ".*"

    def get_timeout_error_regex(self) -> str:
        """Return what a timeout's error says."""
        return "RPC ran for more than"


CALLS = {
    MessageType.CALL: {"PYTHON_CALL", "SCRIPT_CALL"},
    MessageType.MAKE: {"PYTHON_REMOTE_CALL", "SCRIPT_REMOTE_CALL"},
    MessageType.FETCH: {"PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"},
}
"""What torch calls messages that are lost for good, or late."""

RESENT = {
    "RREF_FORK_REQUEST",
    "RREF_CHILD_ACCEPT",
    "RREF_USER_DELETE",
    "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
LATE = {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}
NUM_LOST = 3


class FaultyTransport:
    """Loses the first of an agent's messages of some kinds, and lets others come late.

    A call that is lost was not sent, and times out at once. Reports are not lost while both
    processes live: the first come late.

    Args:
        agent: Its messages.
        lost: Kinds, by torch's names.
        late: Seconds, by torch's names of kinds.
    """

    def __init__(self, agent: RpcAgent, lost: set[str], late: dict[str, float]) -> None:
        self._agent, self._under, self._lost, self._late = agent, agent.transport, lost, late
        self._left = NUM_LOST

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)

    def send(
        self, to: int, message: RpcMessage, memories: list[torch.Tensor], patient: bool = False
    ) -> Outbox | None:
        """Send a message, or not, or later."""
        names = CALLS.get(MessageType(message.kind), set())
        if self._left and names & self._lost:
            self._left -= 1
            self._agent.timers.at(0.0, lambda: self._time_out(message))
            return None
        if self._left and message.link and RESENT & self._lost:
            self._left -= 1
            report = RpcMessage(MessageType.REPORT, message.sender, link=message.link)
            message.link = ()
            self._send_later(0.1, to, report, [])
        late_s = max((self._late.get(name, 0.0) for name in names), default=0.0)
        if not late_s:
            return self._under.send(to, message, memories, patient)
        self._send_later(late_s, to, message, memories)
        return None

    def _send_later(
        self, late_s: float, to: int, message: RpcMessage, memories: list[torch.Tensor]
    ) -> None:
        def send() -> None:
            self._under.send(to, message, memories)

        self._agent.timers.at(time.monotonic() + late_s, send)

    def _time_out(self, message: RpcMessage) -> None:
        """End a call as its timeout would, and its references as those of an unsent message."""
        for call in self._agent.calls.all():
            if call.number == message.number:
                self._agent.caller.fail(call, RpcError("RPC ran for more than set timeout"))
        made = message.make if message.kind == MessageType.MAKE else None
        self._agent.values.not_sent(message.body.references, made)


class FaultyFixture(Fixture):
    """The same for the tests of an agent with faults: Dure's agent gets a `FaultyTransport`."""

    def get_timeout_error_regex(self) -> str:
        """Return what the error says of a call that was late or lost."""
        return "RPC ran for more than"

    def setup_fault_injection(
        self, faulty_messages: list[str] | None, messages_to_delay: dict[str, float] | None
    ) -> None:
        """Take what a test says of the faults; None: the usual ones."""
        lost = RESENT if faulty_messages is None else set(faulty_messages)
        late = LATE if messages_to_delay is None else messages_to_delay
        init_rpc = torch.distributed.rpc.init_rpc

        def init_with_faults(*args: Any, **kwargs: Any) -> None:
            init_rpc(*args, **kwargs)
            agent: Any = current()
            agent.transport = FaultyTransport(agent, lost, late)

        torch.distributed.rpc.init_rpc = init_with_faults


class Forked:
    """Starts the ranks of a case by fork: torch and the tests are imported once."""

    def _spawn_processes(self) -> None:
        context = torch.multiprocessing.get_context("fork")
        self._start_processes(context.Process)  # type: ignore[attr-defined]


def left_out() -> dict[str, str]:
    """Return patterns of cases, each with why it is left out."""
    found: dict[str, str] = {}
    reason = ""
    for line in LEFT_OUT.read_text().splitlines():
        if line.startswith("["):
            reason = line.strip("[]")
        elif line and not line.startswith("#"):
            found[line if "." in line else f"{line}.*"] = reason
    return found


def cases(agent: str) -> tuple[dict[str, type[unittest.TestCase]], dict[str, str]]:
    """Return the cases to run, each with its class, and those left out, each with its reason."""
    with contextlib.ExitStack() as importing:
        if agent == "dure":
            bind_dure()  # of which TorchScript knows nothing: functions stay Python's
            importing.enter_context(mock.patch("torch.jit.script", lambda function: function))
        suites = importlib.import_module("torch.testing._internal.distributed.rpc_utils")
    if agent == "dure":
        import dure

        name = "torch.testing._internal.distributed.ddp_under_dist_autograd_test"
        ddp: Any = sys.modules[name]
        ddp.dist, ddp.DistributedDataParallel = dure, dure.DistributedDataParallel
    fixtures: tuple[type, type] = (Fixture, FaultyFixture)
    if agent == "dure":
        Fixture.beside = ".rpc"
    else:
        place = "torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture"
        fixtures = (Fixture, importlib.import_module(place).FaultyRpcAgentTestFixture)
    run: dict[str, type[unittest.TestCase]] = {}
    out: dict[str, str] = {}
    patterns = left_out()
    for name in ("GENERIC", "GENERIC_CUDA", "TENSORPIPE", "TENSORPIPE_CUDA", "FAULTY_AGENT"):
        for suite in getattr(suites, f"{name}_TESTS"):
            fixture = fixtures[name == "FAULTY_AGENT"]
            bases = (Forked, fixture, suite, suites.SpawnHelper)
            made = type(suite.__name__, bases, {"__module__": __name__})
            globals()[suite.__name__] = made  # some are pickled by name
            for test in unittest.defaultTestLoader.getTestCaseNames(made):
                case = f"{suite.__name__}.{test}"
                why = next((w for p, w in patterns.items() if fnmatch.fnmatchcase(case, p)), None)
                if why is None:
                    run[case] = made
                else:
                    out[case] = why
    return run, out


# --- one case ---------------------------------------------------------------------------------


def last_error(report: str) -> str:
    """Return the line of a traceback that says most."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Lost|Timeout)\b.*:", line)
        and not line.startswith("RuntimeError: Process ")
    ]
    return (errors or lines or ["no report"])[-1][:300]


def judge(case: str, made: type[unittest.TestCase], folder: str) -> None:
    """In a process of its own: run a case, and write its outcome."""
    os.setsid()
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    result = unittest.TestResult()
    made(case.rpartition(".")[2]).run(result)
    failed = [*result.errors, *result.failures]
    outcome = last_error(failed[0][1]) if failed else "passed"
    if result.skipped:
        outcome = f"skipped: {result.skipped[0][1]}"
    Path(f"{folder}/outcome").write_text(outcome)
    sys.stdout.flush()
    os._exit(0)


def run_case(case: str, made: type[unittest.TestCase], limit_s: float, logs: Path | None) -> str:
    """Run a case; return "passed", or what was wrong."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = os.fork()
        if process == 0:
            try:
                judge(case, made, folder)
            finally:
                os._exit(1)
        until = time.monotonic() + limit_s
        while not (ended := os.waitpid(process, os.WNOHANG)[0]) and time.monotonic() < until:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # the ranks, too
            os.killpg(process, signal.SIGKILL)
        if not ended:
            os.waitpid(process, 0)
        written = Path(folder, "outcome")
        if logs is not None:
            logs.mkdir(exist_ok=True)
            shutil.copyfile(Path(folder, "log"), logs / f"{case}.log")
        if not ended:
            return f"hung: not done after {limit_s:g} s"
        return written.read_text() if written.exists() else "died"


# --- the table --------------------------------------------------------------------------------


def read_results() -> dict[str, Any]:
    """Return what is known of each agent, by case."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {"torch": torch.__version__} | {agent: known.get(agent, {}) for agent in AGENTS}


def show_table(results: dict[str, Any], out: dict[str, str]) -> None:
    """Print how many cases pass by class, and each that passes with TensorPipe only."""
    theirs, ours = results["tensorpipe"], results["dure"]
    wanted = [case for case, outcome in theirs.items() if outcome == "passed"]
    print("| tests | cases | pass with TensorPipe | and with Dure |\n| --- | --- | --- | --- |")
    for name in [*dict.fromkeys(case.partition(".")[0] for case in theirs), ""]:
        of = [case for case in theirs if not name or case.startswith(f"{name}.")]
        passing = [case for case in of if case in wanted]
        both = sum(ours.get(case) == "passed" for case in passing)
        print(f"| {name or 'all'} | {len(of)} | {len(passing)} | {both} |")
    print(f"\nleft out: {len(out)}")
    for case in wanted:
        if ours.get(case, "not run") != "passed":
            print(f"- {case}: {ours.get(case, 'not run')}")
    for case, outcome in theirs.items():
        if outcome != "passed":
            print(f"- fails with TensorPipe: {case}: {outcome}; Dure: {ours.get(case, 'not run')}")


def main() -> int:
    """Run cases, or show what is known; return 1 if a case that was run has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agent", choices=AGENTS, default="dure")
    parser.add_argument("--only", default="", help="a regular expression on CLASS.test")
    parser.add_argument("--part", default="1/1", help="2/4: the second of four equal parts")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a case may take")
    parser.add_argument("--logs", type=Path, help="keep what each case prints in this folder")
    parser.add_argument("--failed", action="store_true", help="only those known to have failed")
    parser.add_argument("--write", action="store_true", help="keep the outcomes in results/")
    parser.add_argument("--table", action="store_true", help="only show what is known")
    options = parser.parse_args()
    run, out = cases("tensorpipe" if options.table else options.agent)
    results, failed = read_results(), 0
    if not options.table:
        part, parts = map(int, options.part.split("/"))
        known = results[options.agent]
        chosen = [case for case in run if re.search(options.only, case)][part - 1 :: parts]
        if options.failed:
            chosen = [case for case in chosen if known.get(case, "passed") != "passed"]
        if not chosen:
            parser.error("no case is chosen")
        for case in chosen:
            began = time.monotonic()
            outcome = run_case(case, run[case], options.limit, options.logs)
            print(f"{case}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
            known[case] = outcome
            failed += outcome != "passed" and not outcome.startswith("skipped: ")
            if options.write:
                kept = {agent: results[agent] for agent in AGENTS}
                in_order = {
                    agent: {c: kept[agent][c] for c in run if c in kept[agent]} for agent in AGENTS
                }
                text = json.dumps({**conditions(), **in_order}, indent=1)
                RESULTS.write_text(text + "\n")
    show_table(results, out)
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # makes its pool anew
    torch.set_num_threads(1)
    sys.exit(main())
