"""What `dure run` is asked for: flags, variables and what was found make a job."""

import signal
from pathlib import Path
from typing import Any

import pytest

from dure.cli.run.flags import run_parser
from dure.cli.run.request import make_request
from dure.errors import UsageError
from dure.launch import JobSpec, Std


def spec_of(words: str, variables: dict[str, str] | None = None) -> JobSpec:
    parser = run_parser()
    found = parser.parse_variables(variables or {})
    return make_request(parser.parse([*words.split(), "prog.py"]), found).spec


ETCD = "--rdzv-backend=etcd --rdzv-endpoint=a,b:3,[::1] --rdzv-id=me"
ETCD_PLACES = {"rdzv_backend": "etcd", "endpoint": "a:2379,b:3,[::1]:2379", "run_id": "me"}
MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("--nproc_per_node=3 --role trainer", {"nproc": 3, "role": "trainer"}),
    ("-n3 --max_r 2 -m", {"nproc": 3, "max_restarts": 2, "kind": "module"}),  # the only --max_r
    ("-n=3 --no_python", {"nproc": 3, "kind": "executable"}),
    ("--no-python --run-path", {"kind": "script"}),
    (
        "-t 3 -r 0:1,1:2 --local-ranks-filter 0,2 --duplicate-stdout-filters a,,b,c",
        {
            **{"tee": Std.ALL, "redirects": {0: Std.OUT, 1: Std.ERR}},
            **{"local_ranks_filter": frozenset({0, 2}), "stdout_filters": ("a,b", "c")},
        },
    ),
    (
        "--log-dir d --log-max-size 2m --log-keep 0 --no-fold",
        {"log_dir": Path("d"), "log_max_bytes": 2 << 20, "log_keep": 0, "fold": False},
    ),
    ("--log-dir d --rdzv-id me", {"log_dir": Path("d/me"), "run_id": "me"}),
    (
        "--timeout-term 0.5 --signals-to-handle SIGTERM,SIGUSR1",
        {"grace_s": 0.5, "signals": (signal.SIGTERM, signal.SIGUSR1)},
    ),
    (
        "--no-zygote --elastic --min-ranks 2 --numa-binding node",
        {"zygote": "never", "elastic": True, "min_ranks": 2, "numa": "node"},
    ),
    (
        "--monitor-interval 0.3 --start-method fork --use-env --event-log-handler null "
        "--logs-specs default",
        {},
    ),
    # One host meets nobody.
    ("--standalone --rdzv-endpoint h:1 --rdzv-id x", {}),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0", {}),
    ("--master-addr h --master-port 29501", {"master_addr": "h", "master_port": 29501}),
    # Several hosts.
    ("--nnodes 2", {"nnodes": (2, 2)}),  # check_program asks for an endpoint
    (
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h",
        {"nnodes": (1, 4), "endpoint": "h:29400"},
    ),
    (
        "--nnodes 2 --rdzv-endpoint [::1]:7 --node-rank 1 --rdzv-backend=c10d",
        {"nnodes": (2, 2), "endpoint": "[::1]:7"},
    ),
    (
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1",
        {"nnodes": (2, 2), "node_rank": 1, "endpoint": "10.0.0.1:29500"},
    ),
    (
        "--nnodes 2 --master-addr [::1] --master-port 5",
        {"nnodes": (2, 2), "node_rank": 0, "endpoint": "[::1]:5"},
    ),
    (
        "--nnodes=2 --rdzv-endpoint=h:1 --rdzv-conf is_host=yes,last_call_timeout=3",
        {"nnodes": (2, 2), "endpoint": "h:1", "serves": True, "last_call_s": 3.0},
    ),
    ("--rdzv-conf timeout=9,keep_alive_interval=7", {"join_timeout_s": 9.0, "lease_s": 21.0}),
    ("--rdzv-conf keep_alive_max_attempt=4", {"lease_s": 20.0}),
    ("--rdzv-conf keep_alive_interval=7,lease=15", {"lease_s": 15.0}),
    ("--rdzv-conf timeout=9,join_timeout=8", {"join_timeout_s": 8.0}),
    (f"{ETCD} --nnodes=1:4", {"nnodes": (1, 4), **ETCD_PLACES}),
    (
        f"{ETCD} --rdzv-conf cacert=ca.pem,user=me,password_file=p,timeout=9",
        {
            "rdzv_conf": {"cacert": "ca.pem", "user": "me", "password_file": "p"},
            "join_timeout_s": 9.0,
            **ETCD_PLACES,
        },
    ),
]


@pytest.mark.parametrize(("words", "fields"), MEANINGS)
def test_flags_mean(words: str, fields: dict[str, Any]) -> None:
    assert spec_of(words) == JobSpec(program="prog.py", **fields)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        # Which flag was meant?
        ("--nporc 2", "--nproc"),
        ("--rdzv x", "--rdzv-id"),
        # Values.
        ("--nproc many", "N|auto|cpu|gpu|xpu"),
        ("--standalone=1", "--standalone"),
        ("--nnodes a:b", "N|MIN:MAX"),
        ("--rdzv-backend etcd-v2", "'etcd'"),
        ("--rdzv-conf jointimeout=3", "join_timeout"),
        ("--rdzv-conf store_type=file", "KEY=VALUE"),
        ("--rdzv-conf lease=1", "lease=2"),
        ("--max-restarts -1", "--max-restarts"),
        ("--restart-delay inf", "SECONDS"),
        ("--health-port 65536", "--health-port"),
        ("-r 4", "-r"),
        ("--local-ranks-filter a", "--local-ranks-filter"),
        ("--signals-to-handle SIGNOT", "SIGNOT"),
        # Combinations.
        ("-m --no-python", "--no-python"),
        ("--nnodes 2 --standalone", "--standalone"),
        ("--nnodes 1:2 --node-rank 0", "c10d"),
        ("--rdzv-conf user=me", "--rdzv-backend etcd"),
        ("--min-ranks 2", "--elastic"),
        ("-x A=1", "--export has no effect without --hosts"),
        ("--log-keep 2", "--log-max-size"),
        ("--log-max-size 1K", "--log-dir"),
        ("--restart-delay 1", "--max-restarts"),
        ("--no-zygote --preload json", "--preload"),
        ("--key-stdin --key-file k", "--key-file"),
        ("--hosts a --hostfile b", "--hostfile"),
        ("--hosts a,b --dry-run --nnodes 2", "--hosts and --nnodes"),
    ],
)
def test_mistake_is_one_line_that_names_what_is_right(words: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(words)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("flag", "suggested"), [("--nprocs", "--nproc"), ("--speed", "")])
def test_an_unknown_flag_is_compared_with_similar_ones_only(flag: str, suggested: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(f"{flag} 2")
    assert caught.value.seen == (f"did you mean {suggested}?" if suggested else "")


@pytest.mark.parametrize("words", [["--nproc"], ["--nproc", "2"]])
def test_program_is_needed(words: list[str]) -> None:
    with pytest.raises(UsageError):
        make_request(run_parser().parse(words))


def test_variables_stand_for_flags() -> None:
    variables = {
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "1:3",
        "PET_RDZV_ENDPOINT": "h:1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_MODULE": "1",
        "PET_NO_PYTHON": "0",
        "PET_TEE": "3",
        "PET_LOG_DIR": "",
        "PET_NODE_RANK": "1",
        "PET_SHUTDOWN_TIMEOUT": "2",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3",  # of torch's agent: comes after its launcher's
        "TORCHELASTIC_HEALTH_CHECK_PORT": "8080",
        "PET_SOMETHING_ELSE": "1",
    }
    about: dict[str, Any] = {
        "kind": "module",
        "nproc": 2,
        "nnodes": (1, 3),
        "endpoint": "h:1",
        "tee": Std.ALL,
    }
    spec = spec_of("", variables=variables)
    assert spec == JobSpec(program="prog.py", grace_s=2.0, health_port=8080, **about)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PET_STANDALONE", "yes"),
        ("PET_MAX_RESTARTS", "few"),
        ("PET_RDZV_BACKEND", "zk"),
        ("TORCHELASTIC_HEALTH_CHECK_PORT", "x"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        run_parser().parse_variables({name: text})


def test_flags_come_before_variables_and_these_before_what_was_found() -> None:
    parser = run_parser()
    variables = parser.parse_variables({"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r"})
    found = {"nproc": 8, "role": "slurm", "max_restarts": 1}
    request = make_request(parser.parse(["-n", "1", "p"]), variables, found)
    assert (request.spec.nproc, request.spec.role, request.spec.max_restarts) == (1, "r", 1)
    assert request.set_by_user == {"nproc", "role"}
