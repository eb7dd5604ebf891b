"""The backend over any MPI, through mpi4py."""
