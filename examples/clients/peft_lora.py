"""PEFT: adapters (LoRA) of a frozen model, trained by DDP and by fully_shard; adapters are saved.

dure run --nproc 2 examples/clients/peft_lora.py dure
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
rank = dist.get_rank()


def build() -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def train(model: torch.nn.Module) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    rows = torch.randint(0, 64, (4, 2, 3, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in rows[:, rank]:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def report(name: str, losses: list[float], adapters: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        file = Path(tempfile.mkdtemp()) / "adapter_model.safetensors"
        save_file(adapters, file)
        assert all("lora" in key for key in load_file(file))
        total = sum(tensor.double().abs().sum().item() for tensor in adapters.values())
        print(name, "losses", *losses, "adapters", len(adapters), total)


peft = build()
losses = train(DistributedDataParallel(peft))
report("DDP", losses, get_peft_model_state_dict(peft))

peft = build()
for layer in peft.base_model.model.model.layers:
    fully_shard(layer)
fully_shard(peft)
losses = train(peft)
options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
report("fully_shard", losses, get_model_state_dict(peft, options=options))
dist.destroy_process_group()
