"""transformers' Trainer with K-FAC in muP: a small Llama from a configuration, in bfloat16.

python examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mukron
from mukron.integrations import for_trainer

HEAD = 8  # the size of an attention head; their number grows with the width


def network(width):
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "head_dim": HEAD}
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": width // (2 * HEAD)}
    tokens = {"vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))


torch.manual_seed(0)
model = network(width=64)
plan = mukron.parametrize(model, mukron.base_shapes(network, width=16))
texts = [{"input_ids": (start + torch.arange(16)) % 64} for start in range(64)]  # each token is the last one plus one

with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=20,
        per_device_train_batch_size=16,
        lr_scheduler_type="cosine",
        bf16=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=[{**text, "labels": text["input_ids"]} for text in texts],
        # or mukron.Muon, mukron.Shampoo, mukron.SOAP, torch.optim.AdamW; class_dim is for K-FAC alone
        optimizer_cls_and_kwargs=for_trainer(mukron.KFAC, plan, lr=0.05, class_dim=-1),
    )
    trainer.train()
