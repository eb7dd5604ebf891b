"""End jobs as systemd ends a service: SIGTERM to every process at once, to helpers as well.

Each rank must save its work exactly once, and the launcher must exit with 143. The ranks of a job
that asks together (`dure.elastic`) must save after the same step.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from drills.jobs import Odd, mapped, shared_memory
from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, until

EXIT_CODE = 128 + signal.SIGTERM

BEGIN = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def save(step):
    with open(folder / f"saved-{rank}", "a") as file:
        for part in range(20):  # takes 0.1 s, so that a signal can come in between
            file.write(f"{step} ")
            time.sleep(0.005)
        file.write("end\\n")

def begun():
    (folder / f"begun-{rank}").touch()
"""

KINDS = {
    "own handler": """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
begun()
while not asked:
    time.sleep(0.01)
save(0)
sys.exit(143)
""",
    "preempted": """
import dure
dure.init_process_group()
step = 0
dure.elastic.on_preempt(lambda: save(step))
while not dure.elastic.preempted():
    time.sleep(0.01)
    step += 1
    if step == 2:
        begun()
""",
    "elastic.run": """
import dure
steps = 0
dure.elastic.on_preempt(lambda: save(steps))

def train(state):
    global steps
    while True:
        time.sleep(0.01)
        state.commit()
        steps = state.commits
        if steps == 2:
            begun()

dure.elastic.run(train, dure.elastic.State())
""",
}
"""Programs by kind; each works until it is asked to end, and then saves."""


def end_one(seed: int) -> str:
    """Start a job, end it as systemd does, check that nothing remains, and return its kind.

    Raises:
        Odd: The outcome is not the expected one.
    """
    chance = random.Random(seed)
    kind = chance.choice(list(KINDS))
    num_ranks = chance.choice((1, 2, 3))
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix=f"stop-{seed}-") as name:
        folder = Path(name)
        program = folder / "program.py"
        program.write_text(BEGIN + KINDS[kind])
        (folder / "tmp").mkdir()
        job = Launching(folder / "tmp")
        words = ["--nproc", str(num_ranks)]
        if chance.random() < 0.5:
            words += ["--no-zygote"]
        log = folder / "log"
        launcher = job.start(*words, program, folder, env={"OMP_NUM_THREADS": "1"}, output=log)
        try:
            until(lambda: len(list(folder.glob("begun-*"))) == num_ranks, "all ranks to work")
            time.sleep(chance.uniform(0, 0.05))
            pids = job.left()
            chance.shuffle(pids)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                time.sleep(chance.choice((0, 0, 0.001, 0.01)))
            if chance.random() < 0.5:
                with suppress(ProcessLookupError):
                    os.kill(launcher.pid, signal.SIGHUP)
            code = launcher.wait(PATIENCE_S)
            if code != EXIT_CODE:
                raise Odd(f"{kind}: exit code {code}\n{log.read_text()}")
            until(lambda: not job.left(), "the end of all processes")
        finally:
            job.kill()
        saved = [folder / f"saved-{rank}" for rank in range(num_ranks)]
        texts = [path.read_text() if path.exists() else "" for path in saved]
        steps = {text.split(" ")[0] for text in texts}
        complete = [text == f"{text.split(' ')[0]} " * 20 + "end\n" for text in texts]
        if not all(complete) or len(steps) != 1:
            raise Odd(f"{kind}: not saved once, after the same step: {texts}\n{log.read_text()}")
        left = [path.name for path in (folder / "tmp").iterdir()]
        if files := [name for name in left if not name.startswith("torchinductor_")]:
            raise Odd(f"{kind}: files are left: {files}")
    new = shared_memory() - before
    if mine := new - mapped(new):
        raise Odd(f"{kind}: shared memory is left: {sorted(mine)}")
    return kind


def end_many(wanted: int, seed: int) -> int:
    """End a number of jobs, print each, and return how many had an unexpected outcome."""
    num_odd = 0
    began = time.monotonic()
    for number in range(wanted):
        try:
            verdict = f"{end_one(seed + number)}: as expected"
        except (Odd, AssertionError) as problem:
            num_odd += 1
            verdict = f"ODD: {problem}"
        print(f"{number + 1:4d}  seed {seed + number}  {verdict}", flush=True)
    print(f"\n{wanted} jobs ended, {num_odd} odd, {time.monotonic() - began:.0f} s")
    return num_odd
