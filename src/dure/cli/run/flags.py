"""The flags of `dure run`: those of torchrun, and Dure's own.

To add a flag, add it here and to a table of docs/launch.md. If its name (`dest`, by default its
first long spelling) is a field of `JobSpec` or of `request.Request`, its value becomes that field.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from dure.cli.run.parser import RunParser
from dure.cli.run.values import (
    backend,
    choice,
    config,
    event_log,
    logs_specs,
    nnodes,
    nproc,
    positive_seconds,
    ranks,
    seconds,
    signals,
    size,
    streams,
    whole_number,
    words,
)

__all__ = ["run_parser"]

_DESCRIPTION = """\
Start a program on several ranks, and exit with the code of the first rank that fails. Flags come
before the program. They are torchrun's and some more; underscores may replace dashes, and a
variable PET_<FLAG> may replace a flag of torchrun's.

  dure run --nproc 2 train.py --epochs 3
  dure run --nproc gpu --nnodes 1:4 --rdzv-endpoint head:29400 --max-restarts 3 train.py
"""


@cache
def run_parser() -> RunParser:
    """Return the parser of `dure run`."""
    parser = RunParser("dure run [FLAGS] PROGRAM [ARGUMENTS]...", _DESCRIPTION)
    _add_program(parser)
    _add_hosts(parser)
    _add_failures(parser)
    _add_output(parser)
    _add_processes(parser)
    _add_access(parser)
    _add_compatible(parser)
    return parser


def _add_program(parser: RunParser) -> None:
    parser.start_group("What to start")
    torchrun = partial(parser.add, variable=True)
    torchrun(
        "-n, --nproc, --nproc-per-node N|auto|cpu|gpu|xpu",
        "Number of ranks to start on this host. auto: one per GPU, or one per core if there are "
        "no GPUs. [default: 1]",
        nproc,
    )
    torchrun("-m, --module", "The program is a module, as with python -m.")
    torchrun("--no-python", "The program is not a Python file: start it as it is.")
    torchrun("--run-path", "The program is a Python file, even if --no-python is given.")
    torchrun("--role NAME", "What the ranks find as ROLE_NAME. [default: default]")


def _add_hosts(parser: RunParser) -> None:
    parser.start_group("Several hosts")
    add, torchrun = parser.add, partial(parser.add, variable=True)
    add("--hosts NODES", "Start the job on these hosts over ssh, such as node[1-4,7].")
    add(
        "--hostfile FILE",
        "The same from a file, one host per line; slots=N sets its number of ranks.",
        Path,
    )
    add("--dry-run", "Start nothing; show the command that each host would get.")
    add(
        "-x, --export NAME[=VALUE]",
        "With --hosts: set this variable there, too. May be given several times.",
        dest="exports",
        repeats=True,
    )
    add("--remote-python PATH", "With --hosts: the interpreter there. [default: this one's path]")
    add(
        "--ssh-option OPTION",
        "With --hosts: an option for ssh, such as -p2222. May be given several times.",
        dest="ssh_options",
        repeats=True,
    )
    add("--leash", "End when the standard input ends. --hosts uses it on the hosts.")
    torchrun(
        "--nnodes N|MIN:MAX",
        "Number of hosts that take part. Give this command on each of them. [default: 1]",
        nnodes,
    )
    torchrun(
        "--rdzv-endpoint HOST:PORT[,...]",
        "Where the hosts meet: one of them, and a free port there; or the etcd servers. "
        "[default: port 29400; of etcd 2379]",
        dest="endpoint",
    )
    torchrun(
        "--rdzv-id NAME",
        "The job's name, the same on all hosts. [default: made up; with several hosts: none]",
        dest="run_id",
    )
    torchrun(
        "--rdzv-backend c10d|static|etcd",
        "c10d: hosts are numbered as they arrive. static: by --node-rank, and all must be there. "
        "etcd: as c10d, and the loss of a host does not end the job; needs --rdzv-id. [default: "
        "static with --node-rank or --master-addr, else c10d]",
        backend,
        dest="backend",
    )
    torchrun(
        "--rdzv-conf KEY=VALUE,...",
        "join_timeout (or timeout), last_call_timeout, lease (how long a launcher may be silent; "
        "or keep_alive_interval, keep_alive_max_attempt) in seconds; is_host: 1 or 0. With etcd: "
        "cacert, cert, key (files), user, password_file. [default: "
        "join_timeout=600,last_call_timeout=5]",
        config,
        dest="config",
    )
    torchrun("--node-rank N", "Number of this host, for the static backend.", whole_number(0))
    torchrun(
        "--master-addr HOST", "The host of rank 0, for the static backend. [default: 127.0.0.1]"
    )
    torchrun(
        "--master-port PORT",
        "With one host, what ranks find as MASTER_PORT; with several, the port of the endpoint. "
        "[default: a free one; with several hosts 29500]",
        whole_number(1),
    )
    torchrun("--local-addr ADDRESS", "This host's address for the other hosts. [default: found]")
    torchrun("--standalone", "Use this host alone, and ignore the --rdzv flags.")


def _add_failures(parser: RunParser) -> None:
    parser.start_group("Failures and restarts")
    add, torchrun = parser.add, partial(parser.add, variable=True)
    torchrun(
        "--max-restarts N",
        "How often the program may be restarted, counted for the whole job. [default: 0]",
        whole_number(0),
    )
    add(
        "--elastic",
        "The program survives the death of ranks (dure.elastic): replace dead ranks, and leave "
        "the others running.",
    )
    add(
        "--min-ranks N",
        "With --elastic: end the job if fewer ranks than this are alive. [default: 1]",
        whole_number(1),
    )
    add("--keep-going", "A rank that fails does not end the others (see dure.shrink).")
    add(
        "--restart-delay SECONDS",
        "Longest wait before a restart. The first restart is immediate; if rounds keep failing "
        "within 10 seconds, the next ones wait 1, 2, 4, ... seconds. [default: 30]",
        seconds,
        dest="longest_restart_delay_s",
    )
    add(
        "--hang-timeout SECONDS",
        "If no rank writes a line, reports a step (dure.progress) or finishes a collective for "
        "this time, show where all ranks are, and restart or end the job. [default: never]",
        positive_seconds,
        dest="hang_timeout_s",
    )
    add(
        "--health-port PORT",
        "Answer HTTP requests at this port, for probes of Kubernetes. [default: "
        "TORCHELASTIC_HEALTH_CHECK_PORT, or none]",
        whole_number(1),
    )
    torchrun(
        "--timeout-term, --shutdown-timeout SECONDS",
        "Time from SIGTERM to SIGKILL when the job must end. [default: 5 after a failure, 0.6 "
        "after Ctrl-C, 30 for ranks that catch SIGTERM]",
        seconds,
        dest="grace_s",
    )
    torchrun(
        "--signals-to-handle NAMES",
        "Signals to the launcher that end the job. [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
        signals,
        dest="signals",
    )


def _add_output(parser: RunParser) -> None:
    parser.start_group("Output and files")
    add, torchrun = parser.add, partial(parser.add, variable=True)
    torchrun("--log-dir DIR", "Keep the output of each rank in files here.", Path)
    add(
        "--log-max-size SIZE",
        "Start another file when a log file has this size, such as 100M. [default: no limit]",
        size,
        dest="log_max_bytes",
    )
    add(
        "--log-keep N",
        "With --log-max-size: how many earlier files of each log to keep. [default: 3]",
        whole_number(0),
    )
    add("--event-log FILE", "Write the events of the job here, one JSON object per line.", Path)
    torchrun(
        "-r, --redirects STREAMS",
        "Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank. "
        "[default: 0]",
        streams,
    )
    torchrun(
        "-t, --tee STREAMS", "Streams that go to files and are also shown. [default: 0]", streams
    )
    torchrun(
        "--local-ranks-filter RANKS",
        "Show the output of these local ranks only; files are written for all ranks. "
        "[default: all]",
        ranks,
    )
    torchrun(
        "--duplicate-stdout-filters WORDS",
        "Also keep lines of stdout that contain one of these words in "
        "attempt_N/filtered_stdout.log.",
        words,
        dest="stdout_filters",
    )
    torchrun(
        "--duplicate-stderr-filters WORDS",
        "The same for stderr, in filtered_stderr.log.",
        words,
        dest="stderr_filters",
    )
    add(
        "--prefix auto|rank|host|none",
        "What each line begins with. [default: auto]",
        choice("auto", "rank", "host", "none"),
    )
    add(
        "--no-fold", "Show a line that several ranks write once per rank.", dest="fold", const=False
    )
    add("--timestamps", "Put the time of day before each line.")
    add("--page", "Show the run as a page in a browser of this machine (needs dure[page]).")
    add("--trace-dir DIR", "Where ranks write their flight records, for `dure trace merge`.", Path)


def _add_processes(parser: RunParser) -> None:
    parser.start_group("Cores, devices, processes")
    add, torchrun = parser.add, partial(parser.add, variable=True)
    add(
        "--numa-binding node|socket|exclusive|core-complex",
        "Bind each rank to cores: those near its GPU, or an equal share without GPUs. [default: "
        "not bound]",
        choice("node", "socket", "exclusive", "core-complex"),
        dest="numa",
    )
    torchrun("--virtual-local-rank", "Each rank has LOCAL_RANK 0 and sees one GPU, its own.")
    add("--oversubscribe", "Do not warn if the memory will probably not suffice for the ranks.")
    add(
        "--malloc-defaults",
        "Leave the settings of the C library's malloc as they are. Otherwise ranks keep the "
        "memory they free.",
    )
    add(
        "--no-zygote",
        "Start a new interpreter for each rank, instead of a fork of one that has imported torch.",
        dest="zygote",
        const="never",
    )
    add("--preload MODULES", "Modules to import once for all ranks, in addition to torch.", words)


def _add_access(parser: RunParser) -> None:
    parser.start_group("Access")
    parser.add(
        "--key-file FILE",
        "File with the job's key. [default: DURE_JOB_KEY_FILE, the user's key, or a new one]",
        Path,
    )
    parser.add(
        "--key-stdin",
        "Read the job's key, 64 hexadecimal digits, from the first line of the standard input.",
    )


def _add_compatible(parser: RunParser) -> None:
    parser.start_group("Accepted for compatibility with torchrun")
    add, torchrun = parser.add, partial(parser.add, variable=True)
    torchrun(
        "--monitor-interval SECONDS", "No effect: the end of a rank wakes the launcher.", seconds
    )
    torchrun(
        "--start-method spawn|fork|forkserver",
        "No effect, as in torchrun, which uses it for functions only. See --no-zygote.",
        choice("spawn", "fork", "forkserver"),
    )
    torchrun("--event-log-handler null", "Only null is available. See --event-log.", event_log)
    add("--use-env", "No effect: ranks always find LOCAL_RANK.")
    add("--logs-specs NAME", "Not supported: a plug-in of torch's for log files.", logs_specs)
