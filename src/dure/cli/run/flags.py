"""The flags of `dure run`: those of torchrun, and Dure's own.

To add a flag, add it here, and its row to docs/launch.md (a test prints the rows). If its name
(`dest`, by default its first long spelling) is a field of `JobSpec` or of `request.Request`, its
value becomes that field.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dure.cli.run import values
from dure.cli.run.parser import RunParser

__all__ = ["EXCLUDE", "NEED", "run_parser"]

_DESCRIPTION = """\
Start a program on several ranks, and exit with the code of the first rank that fails. Flags come
before the program. They are torchrun's and some more; underscores may replace dashes, and a
variable PET_<FLAG> may replace a flag of torchrun's.

  dure run --nproc 2 train.py --epochs 3
  dure run --nproc gpu --nnodes 1:4 --rdzv-endpoint head:29400 --max-restarts 3 train.py
"""

NEED = {
    "exports": ("hosts", "hostfile", "dry_run"),
    "remote_python": ("hosts", "hostfile", "dry_run"),
    "ssh_options": ("hosts", "hostfile", "dry_run"),
    "min_ranks": ("elastic",),
    "longest_restart_delay_s": ("max_restarts", "elastic"),
    "log_keep": ("log_max_bytes",),
    "log_max_bytes": ("log_dir", "redirects", "tee", "stdout_filters", "stderr_filters"),
}
"""Of Dure's own flags: those that have no effect unless one of the others is given.

torchrun's flags are not listed: scripts give `--rdzv-endpoint` for one host as well as for many.
"""

_OF_ONE_HOST = ("nnodes", "node_rank", "standalone", "local_addr", "leash")
EXCLUDE = {
    "hosts": ("hostfile", *_OF_ONE_HOST),
    "hostfile": _OF_ONE_HOST,
    "key_stdin": ("key_file",),
    "zygote": ("preload",),
}
"""Flags that exclude others."""

_parser = RunParser("dure run [FLAGS] PROGRAM [ARGUMENTS]...", _DESCRIPTION)
_add = _parser.add
_torchrun = partial(_parser.add, variable=True)


def run_parser() -> RunParser:
    """Return the parser of `dure run`."""
    return _parser


_parser.start_group("What to start")
_torchrun(
    "-n, --nproc, --nproc-per-node N|auto|cpu|gpu|xpu",
    "Ranks to start on this host. auto: one per GPU, or per core without GPUs. [default: 1]",
    values.nproc,
)
_torchrun("-m, --module", "The program is a module, as with python -m.")
_torchrun("--no-python", "The program is not a Python file: start it as it is.")
_torchrun("--run-path", "The program is a Python file, even if --no-python is given.")
_torchrun("--role NAME", "What the ranks find as ROLE_NAME. [default: default]")

_parser.start_group("Several hosts")
_add("--hosts NODES", "Start the job on these hosts over ssh, such as node[1-4,7].")
_add("--hostfile FILE", "The same from a file: one host per line, slots=N for N ranks.", Path)
_add("--dry-run", "Start nothing; show the command that each host would get.")
_add(
    "-x, --export NAME[=VALUE]",
    "With --hosts: set this variable there, too. May be repeated.",
    dest="exports",
    repeats=True,
)
_add("--remote-python PATH", "With --hosts: the interpreter there. [default: this one's path]")
_add(
    "--ssh-option OPTION",
    "With --hosts: an option for ssh, such as -p2222. May be repeated.",
    dest="ssh_options",
    repeats=True,
)
_add("--leash", "End when the standard input ends. --hosts uses it on the hosts.")
_torchrun(
    "--nnodes N|MIN:MAX",
    "Number of hosts. Give this command on each of them. [default: 1]",
    values.nnodes,
)
_torchrun(
    "--rdzv-endpoint HOST:PORT[,...]",
    "Where the hosts meet: one of them, and a free port there; or the etcd servers. "
    "[default: port 29400; of etcd 2379]",
    dest="endpoint",
)
_torchrun(
    "--rdzv-id NAME",
    "The job's name, the same on all hosts. [default: made up; with several hosts: none]",
    dest="run_id",
)
_torchrun(
    "--rdzv-backend c10d|static|etcd",
    "c10d: hosts are numbered as they arrive. static: by --node-rank, and all must be there. "
    "etcd: as c10d, and the loss of a host does not end the job; needs --rdzv-id. [default: "
    "static with --node-rank or --master-addr, else c10d]",
    dest="backend",
)
_torchrun(
    "--rdzv-conf KEY=VALUE,...",
    "join_timeout (or timeout), last_call_timeout, lease (how long a launcher may be silent; or "
    "keep_alive_interval, keep_alive_max_attempt) in seconds; is_host: 1 or 0. With etcd: cacert, "
    "cert, key (files), user, password_file. [default: join_timeout=600,last_call_timeout=5]",
    values.config,
    dest="config",
)
_torchrun("--node-rank N", "Number of this host, for the static backend.", values.count)
_torchrun("--master-addr HOST", "The host of rank 0, for the static backend. [default: 127.0.0.1]")
_torchrun(
    "--master-port PORT",
    "With one host, MASTER_PORT of the ranks; with several, the port of the endpoint. "
    "[default: a free one; with several hosts 29500]",
    values.port,
)
_torchrun("--local-addr ADDRESS", "This host's address for the other hosts. [default: found]")
_torchrun("--standalone", "Use this host alone, and ignore the --rdzv flags.")

_parser.start_group("Failures and restarts")
_torchrun(
    "--max-restarts N",
    "How often the program may be restarted, counted over all hosts. [default: 0]",
    values.count,
)
_add("--elastic", "The program survives deaths (dure.elastic): replace dead ranks only.")
_add(
    "--min-ranks N",
    "With --elastic: end the job if fewer ranks than this are alive. [default: 1]",
    values.count,
)
_add("--keep-going", "A rank that fails does not end the others (see dure.shrink).")
_add(
    "--restart-delay SECONDS",
    "Longest wait before a restart. The first is immediate; if rounds keep failing within 10 "
    "seconds, the next ones wait 1, 2, 4, ... seconds. [default: 30]",
    values.seconds,
    dest="longest_restart_delay_s",
)
_add(
    "--hang-timeout SECONDS",
    "If no rank writes a line, reports a step (dure.progress) or finishes a collective for this "
    "time, show where all ranks are, and restart or end the job (--elastic: replace one rank). "
    "[default: never]",
    values.seconds,
    dest="hang_timeout_s",
)
_add(
    "--health-port PORT",
    "Answer HTTP requests here, for probes of Kubernetes. [default: "
    "TORCHELASTIC_HEALTH_CHECK_PORT, or none]",
    values.port,
    replaced_by="TORCHELASTIC_HEALTH_CHECK_PORT",
)
_add(
    "--metrics-port PORT",
    "Answer requests of Prometheus here: operations, waiting, steps, memory and restarts of this "
    "host's ranks. [default: none]",
    values.port,
)
_torchrun(
    "--timeout-term, --shutdown-timeout SECONDS",
    "Time from SIGTERM to SIGKILL when the job must end. [default: 5 after a failure, 0.6 after "
    "Ctrl-C, 30 for ranks that catch SIGTERM]",
    values.seconds,
    dest="grace_s",
    replaced_by="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
_torchrun(
    "--signals-to-handle SIGTERM,SIGUSR1,...",
    "Signals to the launcher that end the job. [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
    values.signals,
    dest="signals",
)

_parser.start_group("Output and files")
_torchrun("--log-dir DIR", "Keep the output of each rank in files here.", Path)
_add(
    "--log-max-size BYTES|100K|100M|2G",
    "Start another file when a log file has this size. [default: no limit]",
    values.size,
    dest="log_max_bytes",
)
_add("--log-keep N", "Earlier files of each log to keep then. [default: 3]", values.count)
_add("--event-log FILE", "Write the events of the job here, one JSON object per line.", Path)
_torchrun(
    "-r, --redirects 0|1|2|3|RANK:N,...",
    "Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank. [default: 0]",
    values.streams,
)
_torchrun(
    "-t, --tee 0|1|2|3|RANK:N,...",
    "Streams that go to files and are also shown. [default: 0]",
    values.streams,
)
_torchrun(
    "--local-ranks-filter RANK,...",
    "Show the output of these local ranks only; files are written for all. [default: all]",
    values.ranks,
)
_torchrun(
    "--duplicate-stdout-filters WORD,...",
    "Keep lines of stdout that contain one of these in attempt_N/filtered_stdout.log, too.",
    values.words,
    dest="stdout_filters",
)
_torchrun(
    "--duplicate-stderr-filters WORD,...",
    "The same for stderr, in filtered_stderr.log.",
    values.words,
    dest="stderr_filters",
)
_add("--prefix auto|rank|host|none", "What each line begins with. [default: auto]")
_add("--no-fold", "Show a line that several ranks write once per rank.", dest="fold", const=False)
_add("--timestamps", "Put the time of day before each line.")
_add("--page", "Show the run as a page in a browser of this machine (needs dure[page]).")
_add("--trace-dir DIR", "Where ranks write their flight records, for `dure trace merge`.", Path)

_parser.start_group("Cores, devices, processes")
_add(
    "--numa-binding node|socket|exclusive|core-complex",
    "Bind each rank to cores near its GPU; node works without GPUs, too. [default: not bound]",
    dest="numa",
)
_torchrun("--virtual-local-rank", "Each rank has LOCAL_RANK 0 and sees one GPU, its own.")
_add("--oversubscribe", "Do not warn if the memory will probably not suffice for the ranks.")
_add("--malloc-defaults", "Leave malloc as it is: otherwise ranks keep the memory they free.")
_add(
    "--no-zygote",
    "Start a new interpreter for each rank, instead of a fork of one that has imported torch.",
    dest="zygote",
    const="never",
)
_add(
    "--stand-in-gloo",
    "In stock torch, groups of gloo are Dure's, for libraries that know no other name.",
    dest="stand_in",
    const="gloo",
)
_add("--preload MODULE,...", "Import these once for all ranks, like torch.", values.words)

_parser.start_group("Access")
_add(
    "--key-file FILE",
    "File with the job's key. [default: DURE_JOB_KEY_FILE, the user's key, or a new one]",
    Path,
)
_add("--key-stdin", "Read the key, 64 hexadecimal digits, from the first line of the input.")

_parser.start_group("Accepted for compatibility with torchrun")
_torchrun(
    "--monitor-interval SECONDS",
    "No effect: the end of a rank wakes the launcher.",
    values.seconds,
)
_torchrun(
    "--start-method spawn|fork|forkserver",
    "No effect, as in torchrun, which uses it for functions only. See --no-zygote.",
)
_torchrun("--event-log-handler null", "Only torch's default is available. See --event-log.")
_add("--use-env", "No effect: ranks always find LOCAL_RANK.")
_add("--logs-specs default", "Only torch's default is available. See --log-dir, --tee.")
