"""Every variable that detection looks at, and what it means: for `dure env`, and for a test."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CLUSTER_VARIABLES", "set_here"]

CLUSTER_VARIABLES: Mapping[str, str] = {
    "SLURM_JOB_ID": "the Slurm job",
    "SLURM_STEP_ID": "its step; set by srun in every task",
    "SLURM_STEPID": "an older name of SLURM_STEP_ID",
    "SLURM_PROCID": "this task's number in the step",
    "SLURM_STEP_NUM_TASKS": "tasks of the step",
    "SLURM_NTASKS": "tasks of the step, or of the job",
    "SLURM_NODEID": "this host's number in the step",
    "SLURM_LOCALID": "this task's number on its host",
    "SLURM_STEP_NODELIST": "the step's hosts",
    "SLURM_JOB_NODELIST": "the job's hosts",
    "SLURM_NODELIST": "an older name of SLURM_JOB_NODELIST",
    "SLURM_STEP_NUM_NODES": "how many hosts the step has",
    "SLURM_NNODES": "how many hosts the job has",
    "SLURM_STEP_TASKS_PER_NODE": "the step's tasks, host by host",
    "SLURM_TASKS_PER_NODE": "the job's tasks, host by host",
    "SLURM_LAUNCH_NODE_IPADDR": "the address of the host where srun runs",
    "SLURM_PTY_PORT": "this task has a terminal (srun --pty)",
    "SLURM_GPUS_ON_NODE": "GPUs of this host that the step may use",
    "SLURM_RESTART_COUNT": "how often the job was requeued",
    "OMPI_COMM_WORLD_RANK": "this process's number (mpirun of Open MPI)",
    "OMPI_COMM_WORLD_SIZE": "how many processes mpirun started",
    "OMPI_COMM_WORLD_LOCAL_RANK": "this process's number on its host",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "processes on this host",
    "OMPI_MCA_ess_base_jobid": "the job's number (Open MPI 4)",
    "PMIX_NAMESPACE": "the job's name, for launchers that speak PMIx",
    "PMIX_RANK": "this process's number, for launchers that speak PMIx",
    "PMI_RANK": "this process's number (mpiexec of MPICH and Intel MPI)",
    "PMI_SIZE": "how many processes mpiexec started",
    "PMI_JOBID": "the job's name, for launchers that speak PMI",
    "MPI_LOCALRANKID": "this process's number on its host (MPICH and Intel MPI)",
    "MPI_LOCALNRANKS": "processes on this host",
    "I_MPI_HYDRA_UUID": "the job's name (Intel MPI)",
    "SKYPILOT_NODE_RANK": "this host's number",
    "SKYPILOT_NODE_IPS": "the hosts' addresses, one a line",
    "SKYPILOT_NUM_NODES": "how many hosts the task has",
    "SKYPILOT_NUM_GPUS_PER_NODE": "GPUs of each host",
    "SKYPILOT_TASK_ID": "the task's name",
    "JOB_COMPLETION_INDEX": "the pod's index (Kubernetes)",
    "NNODES": "how many pods the job has; the job's YAML sets it",
    "JOBSET_NAME": "the JobSet and its service; the job's YAML sets it",
    "JOBSET_SUBDOMAIN": "the JobSet's service, if it has another name",
    "HOSTNAME": "the pod's name",
    "KUBERNETES_SERVICE_HOST": "set in every pod",
    "PET_NNODES": "how many hosts, for torchrun and dure run",
    "PET_NODE_RANK": "this host's number, for torchrun and dure run",
    "PET_NPROC_PER_NODE": "processes to start here, for torchrun and dure run",
    "PET_MASTER_ADDR": "the first host, for torchrun and dure run",
    "PET_MASTER_PORT": "a port there, for torchrun and dure run",
    "NPROC_PER_NODE": "processes to start here (PAI-DLC)",
    "NODE_RANK": "this host's number, set by hand",
    "RANK": "this process's number; of pods, the host's",
    "WORLD_SIZE": "how many processes take part; of pods, how many hosts",
    "LOCAL_RANK": "this process's number on its host",
    "LOCAL_WORLD_SIZE": "processes on this host",
    "GROUP_RANK": "this host's number",
    "MASTER_ADDR": "the host of rank 0",
    "MASTER_PORT": "a port on that host",
    "TORCHELASTIC_RUN_ID": "the job's name, given by the launcher",
    "DURE_LAUNCHER": "set by `dure run` in every rank",
}


def set_here(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables that are set in `environ`."""
    return {name: environ[name] for name in CLUSTER_VARIABLES if environ.get(name)}
