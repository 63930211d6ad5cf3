"""A training loop of your own with Accelerate: BERT from a configuration, in bfloat16, with accumulated gradients.

python examples/with_accelerate.py
accelerate launch --num_processes 2 examples/with_accelerate.py      # or torchrun
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import mukron
from mukron.integrations import logits_of


def network(width):
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2, "num_labels": 4}
    tokens = {"vocab_size": 64, "max_position_embeddings": 8, "num_attention_heads": width // 8}
    return BertForSequenceClassification(BertConfig(**sizes, **tokens, hidden_dropout_prob=0.0))


torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
model = network(width=64)
plan = mukron.parametrize(model, mukron.base_shapes(network, width=16))
model.to(accelerator.device)
optimizer = mukron.KFAC(model, plan, lr=0.1, output=logits_of)  # before prepare, which may wrap the model

tokens = torch.randint(64, (64, 8))
data = [{"input_ids": text, "labels": text[0] % 4} for text in tokens]
loader = DataLoader(data, batch_size=64 // (2 * accelerator.num_processes))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(10):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss  # computed inside of the model
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    schedule.step()
    mean = accelerator.gather(loss.detach()).mean()
    accelerator.print(f"epoch {epoch}  loss {mean:.3f}")
