"""A program of one rank that ends with a group, and threads that use it.

With a second argument it ends before it makes the group.
"""

import atexit
import sys
import threading

import dure

left = threading.Event()


def call() -> None:
    while True:
        dure.barrier()


def fail() -> None:
    left.wait()
    raise KeyError("of the program")


threads = [threading.Thread(target=each, daemon=True) for each in (call, fail)]


@atexit.register
def join() -> None:
    left.set()
    for thread in threads:
        thread.join()


atexit.register(dure.destroy_process_group)
if len(sys.argv) > 2:
    threads.clear()
    sys.exit()
dure.init_process_group(init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for thread in threads:
    thread.start()
