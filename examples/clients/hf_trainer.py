"""Hugging Face's Trainer: data parallel training of a small Llama on the CPU, with validation.

dure run --stand-in-gloo --nproc 2 examples/clients/hf_trainer.py
"""

import tempfile

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
rows = torch.randint(0, 64, (48, 16))
samples = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    ddp_backend="gloo",  # the Trainer accepts only names from its list
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=samples[:32], eval_dataset=samples[32:])
trainer.remove_callback(PrinterCallback)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
evaluated = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print("losses", *losses)
    print("loss of validation", evaluated)
    print("weights", sum(p.double().abs().sum().item() for p in model.parameters()))
torch.distributed.destroy_process_group()
