"""What a type checker sees of Dure: wrong names, and wrong arguments of typical calls.

Checked by `make lint`, and never run: a comment that silences an error which pyright does not
report is an error itself. `scripts/public_names --types` looks at the type of every public name.
"""

# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
# pyright: reportAttributeAccessIssue=true, reportCallIssue=true, reportIndexIssue=true
import torch

import dure as dist
from dure.algorithms import Jion  # pyright: ignore[reportAttributeAccessIssue]
from dure.fsdp import fully_shrad  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["Jion", "fully_shrad"]

tensor, model = torch.ones(4), torch.nn.Linear(4, 4)

# Names that do not exist, and internal modules without an import.
dist.all_redcue(tensor)  # pyright: ignore[reportAttributeAccessIssue]
dist.all_reduce(tensor, dist.ReduceOp.SUMM)  # pyright: ignore[reportAttributeAccessIssue]
dist.rpc.rpc_snyc("worker1", torch.add)  # pyright: ignore[reportAttributeAccessIssue]
dist.checkpoint.state_dict.get_model_state_dcit(model)  # pyright: ignore[reportAttributeAccessIssue]
dist.native.heap_take(1)  # pyright: ignore[reportAttributeAccessIssue]
dist.data.Dataloader([1])  # pyright: ignore[reportAttributeAccessIssue]

# Arguments of another type, or of no such name.
dist.all_reduce("x")  # pyright: ignore[reportArgumentType]
dist.all_reduce(tensor, async_op="yes")  # pyright: ignore[reportArgumentType]
dist.all_gather(tensor, tensor)  # pyright: ignore[reportArgumentType]
dist.broadcast(tensor, src="0")  # pyright: ignore[reportArgumentType]
dist.barrier(timeout="1 s")  # pyright: ignore[reportArgumentType]
dist.init_process_group(world_size="4")  # pyright: ignore[reportArgumentType]
dist.new_group(ranks=3)  # pyright: ignore[reportArgumentType]
dist.init_device_mesh("cpu", 4)  # pyright: ignore[reportArgumentType]
dist.send(tensor, dst=None, tga=1)  # pyright: ignore[reportCallIssue]
dist.DistributedDataParallel(tensor)  # pyright: ignore[reportArgumentType]
dist.DistributedDataParallel(model, bucket_cap="25 MB")  # pyright: ignore[reportCallIssue]
dist.fsdp.fully_shard(tensor)  # pyright: ignore[reportArgumentType]
dist.tensor.distribute_tensor(tensor, None, [0])  # pyright: ignore[reportArgumentType]
dist.checkpoint.save(tensor, checkpoint_id=3)  # pyright: ignore[reportArgumentType]
dist.TCPStore(29500, "localhost")  # pyright: ignore[reportArgumentType]
dist.DistributedSampler([1, 2], num_replicas="2")  # pyright: ignore[reportArgumentType]

# Right calls, with the types of what they return.
sums: dist.Work | None = dist.all_reduce(tensor, group=dist.new_group([0, 1]), async_op=True)
value: torch.Tensor = dist.rpc.rpc_sync("worker1", torch.neg, args=(tensor,))
later: torch.futures.Future[torch.Tensor] = dist.rpc.rpc_async("worker1", torch.neg, (tensor,))
kind: dist.rpc.BackendType = dist.rpc.BackendType.TENSORPIPE
placements = [dist.tensor.Shard(0), dist.tensor.Replicate()]
options = dist.checkpoint.state_dict.StateDictOptions(full_state_dict=True)
hook = dist.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook
