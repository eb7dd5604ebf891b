"""Exporting a sharded model for inference: safetensors in bfloat16, and a program of torch.export.

Three ways out of a training job, for a server that knows nothing of ranks:

1. from the running job: all ranks write their rows into the files of a Hugging Face folder, in
   bfloat16. No rank holds the complete model.
2. from a checkpoint, later, in one process: `consolidate`, or `dure checkpoint consolidate`.
3. a model that is fed to `torch.export` is a plain one: load the files of 1 or 2 into it.

The check: the files are read with the library `safetensors` into the plain model. Its scores, and
those of the exported program, are the scores of the sharded model.

    dure run --nproc 2 examples/recipes/export.py          (any number that divides 24)
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import dure as dist
from dure.checkpoint import Checkpointer, HuggingFaceStorageWriter, consolidate, save
from dure.checkpoint.state_dict import get_model_state_dict
from dure.fsdp import fully_shard

STEPS, BATCH, WIDTH = 3, 24, 16


def build() -> nn.Sequential:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 4))


def trained(rank: int, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model after some steps."""
    model = build()
    for layer in (model[0], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)):
        model(batch.tensor_split(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def serve(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the plain model with the weights of a folder, as a server without ranks has it."""
    model = build().to(dtype)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    assert all(weight.dtype == dtype for weight in weights.values())
    model.load_state_dict(weights)
    return model.eval()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = trained(rank, size)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(x)

    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        folder = Path(folders[0])

        # 1. All ranks write; max_bytes makes two files of this small model, and an index.
        state = {name: part.bfloat16() for name, part in get_model_state_dict(model).items()}
        save(state, storage_writer=HuggingFaceStorageWriter(folder / "served", max_bytes=1100))
        Checkpointer(folder / "runs", sharded=True).save(STEPS, model=model, optimizer=optimizer)

        if rank == 0:
            served = serve(folder / "served", torch.bfloat16)
            half = served(x.bfloat16()).float()
            torch.testing.assert_close(half, expected, rtol=0.02, atol=0.02)  # 8 bits of mantissa
            for name, part in served.state_dict().items():
                assert part.shape == model.state_dict()[name].shape
            files = sorted(path.name for path in (folder / "served").glob("*.safetensors"))
            assert len(files) == 2, files

            # 2. In one process, with memory for the largest tensor; all 32 bits.
            (checkpoint,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
            consolidate(checkpoint, folder / "consolidated", prefix="model.")
            plain = serve(folder / "consolidated", torch.float32)
            torch.testing.assert_close(plain(x), expected, rtol=1e-6, atol=1e-6)

            # 3. A program without Python code of the model, for any number of rows.
            rows = torch.export.Dim("rows", min=1)
            program = torch.export.export(plain, (x,), dynamic_shapes=({0: rows},))
            torch.export.save(program, folder / "model.pt2")
            loaded = torch.export.load(folder / "model.pt2").module()
            torch.testing.assert_close(loaded(x), expected, rtol=1e-6, atol=1e-6)
            assert loaded(x[:1]).shape == (1, 4)
            print(f"bfloat16 in {len(files)} files, float32 from a checkpoint, model.pt2:")
            print("a plain model and an exported program have the scores of the sharded one")
        dist.barrier()  # the others wait until rank 0 has looked
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
