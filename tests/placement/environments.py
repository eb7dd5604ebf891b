"""Environments as systems really set them, shortened to the variables that Dure reads."""

SLURM_STEP = {  # srun -N 2 -n 7, task 5, Slurm 22.05
    "SLURM_JOB_ID": "476",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "cn[08-09]",
    "SLURM_STEP_NODELIST": "cn[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "192.168.1.203",
}
SLURM_BATCH = {  # the shell of a batch script: SLURM_PROCID is there, and means nothing
    "SLURM_JOB_ID": "476",
    "SLURM_JOB_NODELIST": "cn[08-11]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SLURM_AGENT = SLURM_STEP | {  # srun --ntasks-per-node=1 --gpus-per-node=8, the second host
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "718340097",
    "PMIX_NAMESPACE": "718340097",
    "PMIX_RANK": "1",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
PAI = {
    "MASTER_ADDR": "dlc18isgeayd0000-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "NPROC_PER_NODE": "8",
}
PYTORCHJOB_OLD = {
    "HOSTNAME": "mnist-worker-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "mnist-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
PYTORCHJOB = PYTORCHJOB_OLD | {  # nprocPerNode: 4
    "WORLD_SIZE": "12",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "mnist-master-0",
    "PET_MASTER_PORT": "23456",
}
INDEXED_JOB = {
    "HOSTNAME": "train-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "NNODES": "4",
    "MASTER_ADDR": "train-0.train",
}
JOBSET = {
    "HOSTNAME": "llm-workers-0-3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "3",
    "NNODES": "4",
    "JOBSET_NAME": "llm",
}
PYTORCHJOB_ELASTIC = PYTORCHJOB_OLD | {  # elasticPolicy 1 to 3, with a master
    "PET_NNODES": "1:3",
    "PET_NPROC_PER_NODE": "4",
    "PYTHONUNBUFFERED": "0",
}
KUBEFLOW_TRAINER = {  # a TrainJob of Kubeflow's second operator, which is a JobSet
    "HOSTNAME": "bert-node-0-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "bert-node-0-0.bert",
    "PET_MASTER_PORT": "29400",
}
VOLCANO = {  # its pytorch plugin
    "HOSTNAME": "mnist-worker-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "mnist-master-0.mnist",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
DEEPSPEED = {  # its launcher for several hosts
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
AZURE_PYTORCH = {  # PyTorch distribution, two processes a node
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}
LIGHTNING_CHILD = {  # what Lightning gives the processes that it starts itself
    "LOCAL_RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "40123",
}
NOTHING = dict[str, str]()
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1"}
DURE_RUN = TORCHRUN | {"DURE_LAUNCHER": "abc"}
SLURM_TERMINAL = SLURM_STEP | {"SLURM_PTY_PORT": "4"}  # srun --pty
SALLOC = SLURM_STEP | {"SLURM_STEP_ID": "4294967290"}  # its interactive step
ALL = [value for name, value in sorted(vars().items()) if name.isupper()]
