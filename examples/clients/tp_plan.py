"""transformers' tensor parallelism: `tp_plan="auto"`, a backward pass, and generated tokens.

dure run --nproc 2 examples/clients/tp_plan.py dure
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
one = LlamaForCausalLM(config)
if dist.get_rank() == 0:
    one.save_pretrained(folder[0])
dist.barrier()

model = LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto")
rows = torch.randint(0, 64, (2, 12))
results = model(input_ids=rows, labels=rows)
results.loss.backward()
expected = one(input_ids=rows, labels=rows)
expected.loss.backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


with torch.no_grad():
    torch.testing.assert_close(full(results.logits), expected.logits)
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        gradient = full(p.grad)
        if gradient.shape == q.grad.shape:
            torch.testing.assert_close(gradient, q.grad, msg=name)
tokens = model.generate(rows[:1], max_new_tokens=8, do_sample=False)
assert torch.equal(tokens, one.generate(rows[:1], max_new_tokens=8, do_sample=False))
if dist.get_rank() == 0:
    print("loss", results.loss.item(), "one process", expected.loss.item())
    print("tokens", *tokens[0].tolist())
dist.destroy_process_group()
