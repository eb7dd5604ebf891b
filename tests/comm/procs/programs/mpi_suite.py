"""The conformance suite, and what only the mpi backend has, on the ranks that mpirun started.

The subjects to run are the arguments. Rank 0 prints what ran, as JSON; a failure ends the job.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta

import dure as dist
from tests.comm.conformance import suite
from tests.comm.procs.programs import mpi_cases
from tests.waiting import PATIENCE_S

LIMIT = timedelta(seconds=PATIENCE_S)


def main(subjects: list[str]) -> None:
    suite.SUBJECTS["mpi_cases"] = mpi_cases
    dist.init_process_group("mpi", timeout=LIMIT)
    ran: dict[str, list[str]] = {}
    try:
        for subject in subjects:
            ran[subject] = suite.run(dist.get_rank(), subject)
    except BaseException:
        traceback.print_exc()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
    if dist.get_rank() == 0:
        print(json.dumps(ran), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
