"""Awkward programs, and a stage for them: what each prints must not depend on its start."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.launch import Crash, Exit, JobSpec
from dure.launch.ranks.environment import early_variables
from dure.launch.ranks.processes import adopting_orphans
from dure.launch.ranks.report import ReportReader
from dure.launch.ranks.spawn import RankProcess, start_rank
from dure.launch.ranks.zygote import Zygote, zygote_for

CHEAP = ("textwrap", "decimal")
"""What the zygote imports in place of torch."""


@dataclass
class Seen:
    """What becomes of a rank, seen from outside."""

    out: bytes
    err: bytes
    exit: Exit | None
    crash: Crash | None = None


class Stage:
    """One zygote, before which one program after the other is put on, under one name."""

    def __init__(self, spec: JobSpec, zygote: Zygote) -> None:
        self.spec, self.zygote = spec, zygote
        self._key = os.memfd_create("key")

    def variables(self, **more: str) -> dict[str, str]:
        told: dict[str, str | None] = {"DURE_LAUNCHER": "a-job", "PYTHONUNBUFFERED": "1"}
        told |= {"RANK": "0", "WORLD_SIZE": "1", "DURE_JOB_KEY_FD": str(self._key)}
        return env.child_environment(told | early_variables(self.spec) | dict(self.spec.env)) | more

    def start(self, *, forked: bool = True, **more: str) -> RankProcess:
        zygote = self.zygote if forked else None
        rank = int(more.get("RANK", "0"))
        return start_rank(self.spec, rank, self.variables(**more), (self._key,), zygote)

    def rank(self, *, forked: bool = True, **more: str) -> Seen:
        """Start a rank, and return what became of it."""
        rank = self.start(forked=forked, **more)
        assert (rank.fresh is None) == forked
        return ended(rank)

    def alone(self) -> Seen:
        """Run the program as users do, without a launcher."""
        words = [sys.executable, self.spec.program, *self.spec.args]
        done = subprocess.run(
            words,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=self.variables(),
            start_new_session=True,
            check=False,
        )
        code = done.returncode
        return Seen(done.stdout, done.stderr, Exit(signal=-code) if code < 0 else Exit(code=code))

    def both(self) -> Seen:
        """Start in both ways, compare, and return what was seen."""
        fresh, forked = (self.rank(forked=way) for way in (False, True))
        assert forked == fresh
        return fresh

    def close(self) -> None:
        os.close(self._key)


def ended(rank: RankProcess) -> Seen:
    """Wait for a rank's end."""
    out, err = rank.stdout.readall() or b"", rank.stderr.readall() or b""
    os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
    report = ReportReader()
    report.feed(os.read(rank.report_fd, 1 << 16))
    seen = Seen(out, err, rank.exit(), report.crash)
    rank.release()
    return seen


@contextmanager
def staged(spec: JobSpec, say: Callable[[str], object] = print) -> Iterator[Stage]:
    """Keep a zygote that is ready; nothing of it is left afterwards."""
    never, hold = os.pipe()
    with open(never), open(hold), adopting_orphans(), zygote_for(spec, "a-job", None) as zygote:
        assert zygote is not None
        assert zygote.is_ready(never, say)
        stage = Stage(spec, zygote)
        yield stage
        stage.close()
    assert not os.path.exists(f"/proc/{zygote.pid}")


def put(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


FACTS = """
import ctypes, faulthandler, gc, json, locale, os, signal, stat, sys, threading
import multiprocessing, warnings

def stream(s):
    if s is None:
        return None
    return [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(),
            s.seekable(), type(s.buffer).__name__, s.fileno()]

def descriptors():
    out = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            out[fd] = [stat.S_IFMT(os.fstat(fd).st_mode), os.get_inheritable(fd)]
        except OSError:
            pass
    key = int(os.environ["DURE_JOB_KEY_FD"])
    return [out.get(n) for n in (0, 1, 2, key)], len(out)

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
volatile = ("DURE_LAUNCHER", "DURE_STORE_ADDR", "DURE_JOB_KEY_FILE", "DURE_JOB_KEY_FD",
            "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
main = sys.modules["__main__"]
facts = dict(
    argv=sys.argv, path=sys.path, flags=list(sys.flags), original=sys.orig_argv,
    executable=sys.executable, names=sorted(main.__dict__)[:12], same=main.__dict__ is globals(),
    file=__file__, package=__package__, spec=__spec__ and __spec__.name, doc=__doc__,
    loader=type(__loader__).__name__, cached=__cached__,
    environment={k: v for k, v in sorted(os.environ.items()) if k not in volatile},
    libc=getenv(b"RANK").decode(),
    leader=[os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    threads=[threading.active_count(), len(os.listdir("/proc/self/task")),
             threading.main_thread().native_id == os.getpid(),
             threading.main_thread() is threading.current_thread()],
    streams=[stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    originals=[sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__],
    descriptors=descriptors(), death=death.value, umask=os.umask(0o22), cwd=os.getcwd(),
    handlers=[str(signal.getsignal(n)) for n in range(1, 32)],
    mask=[int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    wakeup=signal.set_wakeup_fd(-1),
    gc=[gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    locale=locale.setlocale(locale.LC_ALL), encoding=sys.getfilesystemencoding(),
    faulthandler=faulthandler.is_enabled(),
    warnings=[str(f) for f in warnings.filters], bytecode=sys.dont_write_bytecode,
    process=[multiprocessing.current_process().name, multiprocessing.parent_process()],
    hash=hash("text") if os.environ.get("PYTHONHASHSEED") else None,
    random=len({__import__("random").random() for _ in range(3)}),
)
for name, value in facts.items():
    print(name, json.dumps(value, default=str))
"""

PROGRAMS: dict[str, str] = {
    "facts": FACTS,
    "multiprocessing": """
        import multiprocessing, os
        class Thing:
            def __init__(self, x): self.x = x
        def work(x):
            return Thing(x * x), os.getppid()
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    out = pool.map(work, range(3))
                print(method, [t.x for t, _ in out], {p == os.getpid() for _, p in out})
            queue = multiprocessing.get_context("spawn").SimpleQueue()
            child = multiprocessing.get_context("spawn").Process(target=queue.put, args=("in",))
            child.start()
            print(queue.get(), child.join(), child.exitcode)
    """,
    "threads_and_atexit": """
        import atexit, threading
        @atexit.register
        def last():
            print("last", threading.active_count())
        atexit.register(print, "before last")
        ended = threading.Event()
        def late():
            ended.wait()
            print("late", __name__)
        threading.Thread(target=late).start()
        def fails():
            raise ValueError("in a thread")
        failing = threading.Thread(target=fails, name="failing")
        failing.start()
        failing.join()
        print("end of main")
        ended.set()
    """,
    "exec_itself_again": """
        import os, sys
        if "again" in sys.argv:
            print("again", sys.argv[1:])
        else:
            os.execv(sys.executable, [*sys.orig_argv, "again"])
    """,
    "fork": """
        import os, sys
        if os.fork() == 0:
            print("child", os.getpid() != os.getsid(0), flush=True)
            raise ValueError("only the child")
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status))
        if os.fork() == 0:
            sys.exit(9)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
    "exception": """
        def inner():
            raise KeyError("missing")
        try:
            inner()
        except KeyError as error:
            raise RuntimeError("outer") from error
    """,
    "own_excepthook": """
        import sys
        def hook(kind, error, trace):
            print("hook", kind.__name__, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        sys.excepthook = hook
        raise ValueError
    """,
    "syntax_error": "def f(:\n    pass\n",
    "files_and_c_buffers": """
        import ctypes, os, sys, atexit
        open("kept" + os.environ["RANK"], "w").write("unflushed")
        file = open("kept" + os.environ["RANK"])
        atexit.register(lambda: print("at exit:", file.read()))
        ctypes.CDLL(None).printf(b"from C, without a newline")
        sys.exit(4)
    """,
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "closes_everything": """
        import os
        os.closerange(3, 200)
        os.close(0)
        print(os.open("/dev/null", os.O_RDONLY))
        os.close(2)
        raise ValueError("unseen")
    """,
    "main_module": """
        from pathlib import Path
        import atexit, beside, dataclasses, pickle, signal, sys
        x: int = 3
        @dataclasses.dataclass
        class Point:
            x: int
        def f(x: print("evaluated")): ...
        print(pickle.loads(pickle.dumps(Point(3))), __annotations__, sorted(globals()))
        print(beside.NAME, Path(__file__).name, sys.flags, sys.modules["__main__"].x)
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        atexit.register(lambda: print("last", pickle.loads(pickle.dumps(Point(4)))))
    """,
}
