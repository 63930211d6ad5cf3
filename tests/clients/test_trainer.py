"""transformers' Trainer, with an optimizer that it builds by ``for_trainer``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mukron
from mukron.integrations import for_trainer, logits_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from outcomes import snippet  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import HF_MODELS, METHODS, exactly, options_of, planned, samples  # noqa: E402

FEATURES = "The Trainer's features"
RESUMING = "Resuming in the Trainer, bit for bit"
BUG = "https://github.com/huggingface/transformers/issues/43701"


def arguments(**options: Any) -> Any:
    usual = {
        "output_dir": "out",
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(**{**usual, **quiet, **options})


def trainer(
    name: str, method: str, options: dict[str, Any] | None = None, dtype: Any = torch.float32, **settings: Any
) -> Any:
    """The options are those of the optimizer, the settings those of the Trainer."""
    model, parametrization = planned(HF_MODELS[name])
    model.to(dtype)
    data = [
        {key: value.to(dtype) if value.is_floating_point() else value for key, value in one.items()}
        for one in samples(name)
    ]
    if name == "BERT":
        model.accepts_loss_kwargs = False  # as docs/works-with.md says: its loss is a mean over the samples it is given
    kind, lr = METHODS[method]
    more = {**options_of(method, name), **(options or {})}
    built = for_trainer(kind, parametrization, lr, **more)
    return transformers.Trainer(
        model=model, args=arguments(**settings), train_dataset=data, optimizer_cls_and_kwargs=built
    )


def trained(*names: Any, **settings: Any) -> Any:
    done = trainer(*names, **settings)
    done.train()
    optimizer = done.optimizer.optimizer
    if isinstance(optimizer, mukron.optim.SecondOrder):
        assert (optimizer.steps, optimizer.skipped) == (done.state.global_step, 0)
    return done


def losses(done: Any) -> list[float]:
    return [row["loss"] for row in done.state.log_history if "loss" in row]


def weights(done: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in done.model.parameters()]


def assert_alike(ours: Any, theirs: Any, **tolerance: float) -> None:
    for mine, other in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(mine, other, **(tolerance or {"rtol": 0, "atol": 0}))


def cells(table: str, **columns: Any) -> list[Any]:
    """A parameter for each model and method, with the cell of the table."""
    return [
        pytest.param(name, method, marks=pytest.mark.cell(table, name, method), id=f"{name}-{method}")
        for name in HF_MODELS
        for method in METHODS
    ]


def feature(row: str, methods: Any = METHODS) -> Any:
    marked = [pytest.param(method, marks=pytest.mark.cell(FEATURES, row, method)) for method in methods]
    return pytest.mark.parametrize("method", marked)


of_all_models = pytest.mark.parametrize("name", HF_MODELS)
MATRICES = {
    "GPT-2": "transformer.h.0.mlp.c_fc.weight",
    "BERT": "bert.encoder.layer.0.intermediate.dense.weight",
    "Llama": "model.layers.0.mlp.up_proj.weight",
    "ViT": "vit.layers.0.mlp.fc1.weight",
}


@pytest.mark.parametrize(("name", "method"), cells("transformers' Trainer in float32"))
def test_trains_in_float32(name, method):
    found = losses(trained(name, method, max_steps=6, per_device_train_batch_size=16))
    assert found[-1] < found[0]


@pytest.mark.parametrize(("name", "method"), cells("transformers' Trainer with bf16=True"))
def test_trains_in_bf16(name, method):
    """The loss is computed inside of the model, whose outputs Accelerate casts to float32."""
    found = losses(trained(name, method, max_steps=6, per_device_train_batch_size=16, bf16=True))
    assert found[-1] < found[0]


@pytest.mark.cell(FEATURES, "every Fisher, bf16", "K-FAC")
@pytest.mark.parametrize("fisher", ["signs", "mc", "exact", "empirical"])
def test_every_fisher_in_bf16(fisher):
    found = losses(trained("BERT", "K-FAC", options={"fisher": fisher}, max_steps=6, bf16=True))
    assert found[-1] < found[0]


@pytest.mark.cell(FEATURES, "the same step as a plain loop", "K-FAC")
def test_takes_the_steps_of_a_plain_loop():
    done = trained("ViT", "K-FAC", max_grad_norm=0.0)
    model, plan = planned(HF_MODELS["ViT"])
    optimizer = mukron.KFAC(model, plan, lr=METHODS["K-FAC"][1], output=lambda returned: returned.logits)
    data = samples("ViT")
    for batch in (data[:8], data[8:], data[:8]):
        optimizer.zero_grad()
        x, y = (torch.stack([one[name] for one in batch]) for name in ("pixel_values", "labels"))
        torch.nn.functional.cross_entropy(model(pixel_values=x).logits, y).backward()
        optimizer.step()
    for ours, theirs in zip(weights(done), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@of_all_models
@feature("gradient accumulation")
def test_accumulated_batches_are_one(name, method):
    """In float64: gradients of BERT that are nearly zero are amplified by most methods, their rounding too."""
    # SOAP's later steps depend on the choice of a basis where the first gradient was zero, which rounding decides
    usual = {"max_grad_norm": 0.0, "options": exactly(method), "max_steps": 1 if method == "SOAP" else 3}
    usual["dtype"] = torch.float64
    whole = trained(name, method, **usual)
    parts = trained(name, method, **usual, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert_alike(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "times"), [("BERT", 2), ("GPT-2", 1), ("Llama", 1), ("ViT", 1)])
def test_the_loss_of_accumulated_batches_without_the_pages_line(name, times):
    """The Trainer takes the loss of BERT for one that it has divided by the samples of the step.

    When this fails, transformers is mended: take the line for BERT in ``trainer``, this test and the note in
    docs/works-with.md away.
    """
    found = []
    for batch in (8, 4):
        model, plan = planned(HF_MODELS[name])
        done = transformers.Trainer(
            model=model,
            args=arguments(max_steps=1, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch),
            train_dataset=samples(name),
            optimizer_cls_and_kwargs=for_trainer(torch.optim.SGD, plan, 0.1),
        )
        done.train()
        found += losses(done)
    assert found[1] == pytest.approx(times * found[0], rel=1e-4)


@of_all_models
@feature("gradient checkpointing")
def test_checkpointed_activations_change_nothing(name, method):
    plain, checkpointed = trained(name, method), trained(name, method, gradient_checkpointing=True)
    assert checkpointed.model.is_gradient_checkpointing
    assert_alike(checkpointed, plain, rtol=1e-5, atol=1e-6)


@of_all_models
@feature("clipping (max_grad_norm)")
def test_clipping_shortens_the_step(name, method):
    """A rule that follows the gradient's length is shortened; the others take the step that they took."""
    start = planned(HF_MODELS[name])[0]
    options = {"K-FAC": {"trust": None, "lr": 1e-2}, "Muon": {"momentum": 0.0}}.get(method, {})
    lr = options.pop("lr", METHODS[method][1])
    lengths = []
    for norm in (1e9, 1e-3 if method == "K-FAC" else 0.03):  # gradients of AdamW and SOAP stay above their eps
        model, plan = planned(HF_MODELS[name])
        done = transformers.Trainer(
            model=model,
            args=arguments(max_steps=1, max_grad_norm=norm),
            train_dataset=samples(name),
            optimizer_cls_and_kwargs=for_trainer(METHODS[method][0], plan, lr, **options_of(method, name), **options),
        )
        done.train()
        key = MATRICES[name]
        lengths.append(float((done.model.get_parameter(key) - start.get_parameter(key)).detach().norm()))
    assert lengths[1] < 0.01 * lengths[0] if method == "K-FAC" else lengths[1] == pytest.approx(lengths[0], rel=0.05)


def test_the_pages_callback_clips_in_units_of_the_plan():
    """It is the class that docs/works-with.md shows."""
    scope = {"TrainerCallback": transformers.TrainerCallback}
    exec(snippet("class ClipInUnitsOfThePlan"), scope)
    model, plan = planned(HF_MODELS["BERT"])
    done = transformers.Trainer(
        model=model,
        args=arguments(max_grad_norm=0, max_steps=1),
        train_dataset=samples("BERT"),
        optimizer_cls_and_kwargs=for_trainer(torch.optim.SGD, plan, 1.0),
        callbacks=[scope["ClipInUnitsOfThePlan"](plan, 0.01)],
    )
    done.train()
    other, its_plan = planned(HF_MODELS["BERT"])
    optimizer = its_plan.optimizer(torch.optim.SGD, 1.0)
    batch = {name: torch.stack([one[name] for one in samples("BERT")[:8]]) for name in ("input_ids", "labels")}
    other(**batch).loss.backward()
    assert its_plan.clip_grad_norm_(0.01) > 0.02
    optimizer.step()
    for ours, theirs in zip(weights(done), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


SCHEDULES = {"linear": 1 / 3, "cosine": 0.25, "polynomial": 1 / 3, "constant_with_warmup": 1.0, "inverse_sqrt": None}


@feature("schedulers")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_move_all_groups_alike(method, schedule):
    """Groups of a plan keep their ratios, and the last step was taken with the scheduled rate."""
    done = trainer("BERT", method, lr_scheduler_type=schedule)
    rates = []
    done.add_callback(_Rates(rates))
    done.train()
    first, last = rates[0], rates[-1]
    ratios = [after / before for before, after in zip(first, last, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-4)
    if SCHEDULES[schedule] is not None:
        assert ratios[0] == pytest.approx(SCHEDULES[schedule], rel=1e-4)
    assert len({*first}) == 1  # the plan's factors are outside of groups' learning rates, out of a scheduler's reach
    assert (len({group.get("lr_multiplier") for group in done.optimizer.param_groups}) > 1) == (method == "AdamW")


class _Rates(transformers.TrainerCallback):
    """Notes the learning rates that each step is taken with."""

    def __init__(self, rates: list[list[float]]) -> None:
        self.rates = rates

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize("name", [name for name in HF_MODELS if name != "BERT"])
@feature("schedulers")
def test_a_schedule_reaches_every_model(name, method):
    """The last of three steps of a linear schedule has a third of the first one's rate."""
    done = trainer(name, method, lr_scheduler_type="linear")
    rates = []
    done.add_callback(_Rates(rates))
    done.train()
    assert rates[2] == pytest.approx([rate / 3 for rate in rates[0]], rel=1e-4)


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}


def resuming(names: Any, row: str = "{}", **marked: Any) -> list[Any]:
    """A parameter for each model and method, with the cell of the table, and whether in bf16."""
    return [
        pytest.param(
            *(name, method, bf16),
            marks=[pytest.mark.cell(RESUMING, row.format(name), method), *marked.get(name, [])],
            id=f"{name}-{method}-{'bf16' if bf16 else 'float32'}",
        )
        for name in names
        for method in METHODS
        for bf16 in ((False, True) if name == "GPT-2" else (True,))
    ]


NOT_LOADED = pytest.mark.xfail(strict=True, raises=AssertionError, reason=BUG)


@pytest.mark.parametrize(("name", "method", "bf16"), resuming(HF_MODELS, ViT=[NOT_LOADED]))
def test_a_resumed_run_is_bit_for_bit_the_same(name, method, bf16):
    whole = trained(name, method, **SAVING, bf16=bf16)
    resumed = trainer(name, method, **SAVING, bf16=bf16)
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    assert resumed.state.global_step == 4
    assert_alike(resumed, whole)


@pytest.mark.parametrize(("name", "method", "bf16"), resuming(["ViT"], "{}, weights loaded before"))
def test_a_model_with_the_weights_of_a_checkpoint_is_resumed(name, method, bf16):
    """As docs/works-with.md says."""
    whole = trained(name, method, **SAVING, bf16=bf16)
    resumed = trainer(name, method, **SAVING, bf16=bf16)
    model, checkpoint = resumed.model, "out/checkpoint-2"
    model.load_state_dict(type(model).from_pretrained(checkpoint).state_dict())
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_alike(resumed, whole)


def test_transformers_without_mukron_does_not_load_the_layers_of_vit():
    """Checkpoints have the names of older versions, and the Trainer does not translate them back.

    When this fails, transformers is mended: take NOT_LOADED, the test above and the note in docs/works-with.md away.
    """
    whole, resumed = (
        transformers.Trainer(
            model=planned(HF_MODELS["ViT"])[0],
            args=arguments(**SAVING, learning_rate=1e-3, seed=1),
            train_dataset=samples("ViT"),
        )
        for _ in range(2)
    )
    whole.train()
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    with pytest.raises(AssertionError, match="not equal"):
        assert_alike(resumed, whole)
    saved = set(load_file("out/checkpoint-2/model.safetensors"))
    assert {name for name in resumed.model.state_dict() if name not in saved} == {
        name for name in resumed.model.state_dict() if name.startswith("vit.layers.")
    }


def test_fused_kfac_is_refused_at_once():
    """The Trainer multiplies gradients by a factor at every step, with ``max_grad_norm=0`` too."""
    with pytest.raises(ValueError, match="fused=True of KFAC does not work in the Trainer"):
        trainer("BERT", "K-FAC", options={"fused": True})
    model, plan = planned(HF_MODELS["BERT"])
    optimizer = mukron.KFAC(model, plan, lr=0.05, output=logits_of, fused=True)
    done = transformers.Trainer(
        model=model, args=arguments(max_grad_norm=0.0), train_dataset=samples("BERT"), optimizers=(optimizer, None)
    )
    with pytest.raises(RuntimeError, match="gradients were changed"):
        done.train()


@feature("LoRA (peft)")
def test_trains_the_adapters_of_peft(method):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(HF_MODELS["BERT"](), config)
    before = copy.deepcopy(model.state_dict())
    kind, lr = METHODS[method]
    build = (kind, None, lr)
    done = transformers.Trainer(
        model=model,
        args=arguments(max_steps=6, bf16=True),
        train_dataset=samples("BERT"),
        optimizer_cls_and_kwargs=for_trainer(*build),
    )
    done.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert any("lora_A" in name for name in moved)
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    assert losses(done)[-1] < losses(done)[0]


def test_a_class_in_place_of_a_factory_is_told_what_to_do():
    model, plan = planned(HF_MODELS["BERT"])
    options = {"parametrization": plan, "lr": 0.1}
    data = samples("BERT")
    done = transformers.Trainer(
        model=model, args=arguments(), train_dataset=data, optimizer_cls_and_kwargs=(mukron.KFAC, options)
    )
    with pytest.raises(TypeError, match=r"optimizer_cls_and_kwargs=for_trainer\(mukron.KFAC, plan"):
        done.train()
