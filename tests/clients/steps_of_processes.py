"""A few steps of every method in the Trainer, each of 16 samples on all processes together; the first one keeps the
weights in ``steps-{processes}.pt``.
"""

import os

import torch
import transformers
from tiny import HF_MODELS, METHODS, exactly, options_of, planned, samples

from mukron.integrations import for_trainer

# SOAP's later steps depend on the choice of a basis where the first gradient was zero, which rounding decides
RUNS = {method: ("Llama", kind, lr, 1 if method == "SOAP" else 3) for method, (kind, lr) in METHODS.items()}
RUNS["BERT"] = ("BERT", torch.optim.SGD, 0.1, 3)  # its loss is a mean over the samples of a process
processes = int(os.environ.get("WORLD_SIZE", "1"))
found = {}
for method, (name, kind, lr, steps) in RUNS.items():
    model, plan = planned(HF_MODELS[name])
    if name == "BERT":
        model.accepts_loss_kwargs = False  # docs/works-with.md
    model.double()  # gradients that are nearly zero are amplified by most methods, their rounding too
    arguments = transformers.TrainingArguments(
        output_dir="out",
        max_steps=steps,
        per_device_train_batch_size=16 // processes,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    built = for_trainer(kind, plan, lr, **options_of(method, name), **exactly(method))
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=samples(name, 48), optimizer_cls_and_kwargs=built
    )
    trainer.train()
    assert trainer.state.global_step == steps
    found[method] = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
if os.environ.get("RANK", "0") == "0":
    torch.save(found, f"steps-{processes}.pt")
