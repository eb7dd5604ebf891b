"""What `dure run --page` costs a training step: both ways in one run, in turns.

    python benchmarks/page.py [--nproc N] [--blocks N] [--json FILE]

A model is trained with `DistributedDataParallel`, and each step is logged (`dure.log`). In a block
*with*, the ranks publish, and the page's process reads that and serves a reader, as a browser would
be. In a block *without*, the ranks publish nothing, and the page's process is stopped (SIGSTOP).
Blocks take turns, and the order within a pair does, so that what else the machine does hits both
alike. Reported is the median over pairs of the ratio of the blocks' mean steps, with its quartiles:
publishing every other second hits few steps, which a median step would not show. Beside it, the
same for the processor time of rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from dure.cli.machine import conditions

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/#(\S+)")
BLOCK_S = 3.0


def rank_main(blocks: int) -> None:
    """Train in blocks with and without publishing, and print what steps took."""
    import torch  # lazy: only ranks compute
    from torch import nn

    import dure as dist
    from dure.trace import publishing

    dist.init_process_group()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = dist.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(256, 512), torch.randint(0, 10, (256,))
    number = 0

    def step() -> float:
        nonlocal number
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        number += 1
        dist.log(number, loss=loss.item())
        return time.perf_counter() - began

    warm = statistics.median(step() for _ in range(60))
    count = torch.tensor(max(30, int(BLOCK_S / warm)))
    dist.broadcast(count, 0)
    for block in range(2 * blocks):
        wanted = (block % 2 == 0) == (block // 2 % 2 == 0)
        if wanted:
            publishing.start()
        else:
            publishing.stop()
        if dist.get_rank() == 0:
            print("with" if wanted else "without", flush=True)
            sys.stdin.readline()  # the page's process has been stopped, or goes on
        dist.barrier()
        used = time.process_time()
        times = [step() for _ in range(int(count))]
        used = (time.process_time() - used) / len(times)
        if dist.get_rank() == 0:
            print(json.dumps([wanted, statistics.fmean(times), used, len(times)]), flush=True)
    if dist.get_rank() == 0:
        print(json.dumps(["publishing", publication_s()]), flush=True)
        print("with", flush=True)  # the page's process has an end to come to
        sys.stdin.readline()


def publication_s() -> float:
    """Return the processor time of writing what is published once."""
    from dure.trace import flight  # lazy: only ranks compute

    with tempfile.TemporaryDirectory() as folder:
        times: list[float] = []
        for _ in range(20):
            began = time.thread_time()
            flight.publish(Path(folder), "page", (150, 500, 500))
            times.append(time.thread_time() - began)
    return statistics.median(times)


def read_as_a_browser(port: int, token: str) -> None:
    """Exchange the token, and read the events until they end."""
    host = f"127.0.0.1:{port}"
    line = http.client.HTTPConnection(host, timeout=600)
    line.request("POST", "/session", token, {"Origin": f"http://{host}"})
    answer = line.getresponse()
    path, cookie = json.loads(answer.read())["path"], answer.headers["set-cookie"]
    line.request("GET", f"{path}events", headers={"Cookie": cookie.partition(";")[0]})
    events = line.getresponse()
    with contextlib.suppress(http.client.IncompleteRead):  # the run has ended
        while events.read1(1 << 16):
            pass


def page_process(launcher: int) -> psutil.Process:
    children = psutil.Process(launcher).children()
    return next(p for p in children if "dure.viewer" in p.cmdline())


def measure(nproc: int, blocks: int) -> dict[str, object]:
    """Run the job, stop and continue the page's process as it says, and compare."""
    words = ["-m", "dure.cli", "run", "-n", str(nproc), "--page", "--prefix", "none", "--no-fold"]
    job = subprocess.Popen(
        [sys.executable, *words, __file__, "--rank", "--blocks", str(blocks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None
    assert job.stderr is not None
    match = ADDRESS.search(job.stderr.readline())
    assert match is not None
    reader = threading.Thread(target=read_as_a_browser, args=(int(match[1]), match[2]), daemon=True)
    reader.start()
    page = page_process(job.pid)
    found: dict[bool, list[float]] = {True: [], False: []}
    worked: dict[bool, list[float]] = {True: [], False: []}
    steps, publishing_s = 0, 0.0
    before = used = None
    for line in job.stdout:
        if line.startswith('["publishing"'):
            publishing_s = json.loads(line)[1]
        elif line.startswith("["):
            wanted, seconds, processor_s, steps = json.loads(line)
            found[wanted].append(seconds)
            worked[wanted].append(processor_s)
            used = page.cpu_times()
            before = before or used  # without the first block, in which it is loaded
        else:
            os.kill(page.pid, signal.SIGCONT if line.strip() == "with" else signal.SIGSTOP)
            job.stdin.write("\n")
            job.stdin.flush()
    job.stderr.read()
    assert job.wait() == 0
    assert before is not None
    assert used is not None
    low, middle, high = _quartiles(found)
    return {
        "nproc": nproc,
        "pairs": len(found[True]),
        "steps_per_block": steps,
        "step_with_ms": statistics.median(found[True]) * 1e3,
        "step_without_ms": statistics.median(found[False]) * 1e3,
        "publication_ms": publishing_s * 1e3,
        "page_share_of_a_core": (sum(used[:2]) - sum(before[:2])) / sum(found[True][1:]) / steps,
        "cost": middle,
        "cost_quartiles": [low, high],
        "processor_cost_quartiles": _quartiles(worked),
        "cores": os.cpu_count(),
    }


def _quartiles(found: dict[bool, list[float]]) -> list[float]:
    """Return the quartiles of what blocks with the page cost more than those without."""
    ratios = [a / b - 1 for a, b in zip(found[True], found[False], strict=True)]
    return statistics.quantiles(ratios, n=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help="be a rank of the job")
    options = parser.parse_args()
    if options.rank:
        rank_main(options.blocks)
        return
    result = measure(options.nproc, options.blocks)
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps({**conditions(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
