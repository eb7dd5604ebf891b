"""A Hugging Face model of 8 files in a 2 x 2 mesh: no rank has more than its part, then generate.

`save_pretrained` of transformers wrote the files. The same class is made on the meta device, its
attention and MLP are divided along "tp", all layers along "dp", and `load` reads into each rank's
part the bytes that belong there. Names in the files are those of the model.

The check: one process loads the model with `from_pretrained`; logits, gradients and what it
generates are equal.

dure run --nproc 4 examples/clients/hf_eight_shards.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import dure as dist
from dure.checkpoint import HuggingFaceStorageReader, load
from dure.checkpoint.state_dict import get_model_state_dict
from dure.device_mesh import init_device_mesh
from dure.fsdp import fully_shard
from dure.tensor import Replicate
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def load_into_mesh(folder: str) -> tuple[LlamaForCausalLM, int]:
    """Return the model, divided over 2 x 2 ranks, and the bytes that this rank has read."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(CONFIG)  # a buffer that no file has
    found = load(get_model_state_dict(model), storage_reader=HuggingFaceStorageReader(folder))
    assert found.missing_keys == found.unexpected_keys == []
    return model, found.num_bytes


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as mine:
        if rank == 0:
            torch.manual_seed(0)
            LlamaForCausalLM(CONFIG).save_pretrained(mine, max_shard_size="100KB")
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        files = list(Path(folders[0]).glob("*.safetensors"))
        model, num_bytes = load_into_mesh(folders[0])
        alone = LlamaForCausalLM.from_pretrained(folders[0])  # the reference: all of it
        dist.barrier()  # no rank removes the folder before all have read

    words = torch.randint(CONFIG.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    found, expected = (net(input_ids=words, labels=words) for net in (model, alone))
    torch.testing.assert_close(found.logits, expected.logits)
    for answer in (found, expected):
        answer.loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, part in model.named_parameters():
        torch.testing.assert_close(part.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6)
    model.eval(), alone.eval()
    continued = [
        net.generate(words, max_new_tokens=5, do_sample=False, pad_token_id=0)
        for net in (model, alone)
    ]
    assert torch.equal(*continued)

    full = sum(p.nbytes for p in alone.parameters())
    held = sum(p.to_local().nbytes for p in model.parameters())
    assert num_bytes == held < 0.26 * full, (num_bytes, held, full)
    if rank == 0:
        print(f"{len(files)} files of {full} bytes: read and held by a rank {held}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
