"""Loading Hugging Face weights of 8 files into a 2 x 2 mesh, no rank with more than its part.

The model is made on the meta device, without memory. Tensor parallelism divides its layers along
one axis of the mesh and `fully_shard` along the other, and `to_empty` allocates this rank's part.
Then `load` fills these tensors in place. It reads the index, and of each file only the bytes of the
elements that this rank has: rows, or columns.

The files have other names than the model; the state to load is a dict, so its keys are renamed.

The check: rank 0 writes the files with the library `safetensors`, and computes scores by a formula.

    dure run --nproc 4 examples/recipes/load_hugging_face.py          (any number up to 8)
"""

import json
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import dure as dist
from dure.checkpoint import HuggingFaceStorageReader, load
from dure.checkpoint.state_dict import get_model_state_dict
from dure.device_mesh import init_device_mesh
from dure.fsdp import fully_shard
from dure.tensor import Replicate
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORDS, WIDTH, HIDDEN, LAYERS, FILES = 64, 16, 32, 6, 8
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.gate": ColwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
NAMES = {"embed": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
NAMES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "head": "lm_head"}


def in_files(name: str) -> str:
    """Return the name that a parameter has in the files."""
    return ".".join(NAMES.get(part, part) for part in name.split("."))


class Layer(nn.Module):
    """The MLP of a Llama, with a residual: [n, width] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """Words [n] to scores [n, words]: a Llama without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def hub_weights() -> dict[str, torch.Tensor]:
    """Return the weights by the names of the files; each element has its own value."""
    parts = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    shapes = {f"model.layers.{i}.mlp.{n}_proj": parts[n] for i in range(LAYERS) for n in parts}
    words = (WORDS, WIDTH)
    shapes |= {"model.embed_tokens": words, "model.norm": (WIDTH,), "lm_head": words}
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.arange(math.prod(shape)).view(shape)
        weights[f"{name}.weight"] = torch.sin(values + 0.1 * number) / WIDTH**0.5
    return weights


def write_files(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write weights as a model of the hub has them: several files, and an index that names them."""
    index: dict[str, str] = {}
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        index |= dict.fromkeys(list(weights)[number::FILES], file)
        save_file({name: weights[name] for name in index if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def scores_of(weights: dict[str, torch.Tensor], words: torch.Tensor) -> torch.Tensor:
    """Return the scores by the formula, from complete weights."""
    x = weights["model.embed_tokens.weight"][words]
    for i in range(LAYERS):
        mlp = f"model.layers.{i}.mlp"
        gate, up, down = (weights[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return F.rms_norm(x, (WIDTH,), weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as mine:
        if rank == 0:
            write_files(Path(mine), hub_weights())
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        tp = 2 if size % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Model()
        parallelize_module(model, mesh["tp"], PLAN)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        model.to_empty(device="cpu")  # this rank's part; buffers that no file has are yours to fill
        state = {in_files(name): part for name, part in get_model_state_dict(model).items()}
        found = load(state, storage_reader=HuggingFaceStorageReader(folders[0]))
        dist.barrier()  # no rank removes the folder before all have read
    assert found.missing_keys == found.unexpected_keys == []
    weights = hub_weights()
    for name, part in model.named_parameters():
        assert torch.equal(part.full_tensor(), weights[in_files(name)]), name
    with torch.no_grad():
        scores = model(torch.arange(WORDS))
    torch.testing.assert_close(scores, scores_of(weights, torch.arange(WORDS)))
    whole = sum(tensor.nbytes for tensor in weights.values())
    held = sum(part.to_local().nbytes for part in model.parameters())
    assert found.num_bytes == held < 1.1 * whole / size, (found.num_bytes, held, whole)
    if rank == 0:
        print(f"{FILES} files, {whole} bytes of weights: all elements are where they belong")
        print(f"of a {size // tp} x {tp} mesh this rank has read and holds {held} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
