"""The conformance suite over `hybrid_mpi`, under mpirun: hosts of two ranks, only pretended."""

import os
import sys

for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
    if name in os.environ:
        os.environ["DURE_HOST_ID"] = f"host-{int(os.environ[name]) // 2}"

import dure as dist  # noqa: E402 (after the host's name is set)
from tests.comm.conformance import suite  # noqa: E402

with dist.process_group("hybrid_mpi"):
    for subject in sys.argv[1:]:
        ran = suite.run(dist.get_rank(), subject, ("case_order_of_reduction_is_that_of_ranks",))
        if dist.get_rank() == 0:
            print(subject, len(ran), dist.get_backend(), flush=True)
