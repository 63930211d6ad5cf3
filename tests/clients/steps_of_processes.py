"""A few steps of every method in the Trainer, each of 16 samples on all processes together; the first one keeps the
weights in ``steps-{processes}.pt``.
"""

import os

import torch
import transformers
from tiny import HF_MODELS, METHODS, exactly, options_of, planned, samples

from mukron.integrations import for_trainer

NAME = "Llama"  # whose loss is a mean over the tokens of all processes; that of BERT is multiplied by their number
# SOAP's later steps depend on the choice of a basis where the first gradient was zero, which rounding decides
STEPS = dict.fromkeys(METHODS, 3) | {"SOAP": 1}
processes = int(os.environ.get("WORLD_SIZE", "1"))
found = {}
for method, (kind, lr) in METHODS.items():
    model, plan = planned(HF_MODELS[NAME])
    model.double()  # gradients that are nearly zero are amplified by most methods, their rounding too
    arguments = transformers.TrainingArguments(
        output_dir="out",
        max_steps=STEPS[method],
        per_device_train_batch_size=16 // processes,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    built = for_trainer(kind, plan, lr, **options_of(method, NAME), **exactly(method))
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=samples(NAME, 48), optimizer_cls_and_kwargs=built
    )
    trainer.train()
    assert trainer.state.global_step == STEPS[method]
    found[method] = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
if os.environ.get("RANK", "0") == "0":
    torch.save(found, f"steps-{processes}.pt")
