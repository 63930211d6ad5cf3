"""ResNet-50 on ImageNet: is muP better at every learning rate, and does the best one stay where it is?"""

from __future__ import annotations

from typing import Any

from mukron.paper import drawing
from mukron.paper.claims import beats_everywhere
from mukron.paper.drawing import Panel
from mukron.paper.optima import stays
from mukron.paper.recipe import Claim, Experiment, Part, Scale, recipe
from mukron.paper.settings import heuristic, rescaled, setting, study
from mukron.paper.widths import wider_is_better
from mukron.train import RunConfig

IMAGENET_EPOCHS = 55


def imagenet(scale: Scale) -> RunConfig:
    """ResNet-50 by K-FAC, 55 epochs."""
    config = setting(
        scale,
        **{"model": "resnet50", "model_options": {"stem": "imagenet"}, "data": "imagenet", "batch": 1024},
        **{
            "data_options": {"size": 224},
            "augment": ("crop", "flip", "cutout"),
            "epochs": IMAGENET_EPOCHS,
            "schedule": "cosine",
        },
        **{"loss": "cross-entropy", "label_smoothing": 0.1, "method": "kfac", "dtype": "tf32"},
        **{"method_options": {"memory": "ema:0.95", "trust": "kl:0.001"}},
    )
    few: dict[str, Any] = {"samples": 512, "test_samples": 500, "epochs": 2, "batch": 128, "data_options": {"size": 64}}
    return config.replace(**few) if scale is Scale.SMALL else config


IMAGENET = (
    "tau is not defined in the paper; 0.05 is read as the weight of the newest batch in the average of the factors.",
    "Batch, schedule and the constant of the clipping: not given; 1,024, cosine and 0.001.",
    "Widths count as elsewhere: the original network is 4.",
)


@recipe("k-fac-mup-lr", "Figure 5", "muP has the higher accuracy at every learning rate (ResNet-50 on ImageNet)")
def mup_lr(scale: Scale) -> Experiment:
    rates = (0.025, 0.05, 0.1, 0.2, 0.4)
    config = imagenet(scale)
    schemes = (f"sp/{heuristic(0.001)}", f"mup/{rescaled(0.001)}")
    parts: dict[str, Part] = {
        name: study(scale, config, scheme, widths=(scale.choose(1.0, 1.0, 4.0),), lr=rates, seeds=1)
        for name, scheme in zip(("SP", "muP"), schemes, strict=True)
    }
    claims = [Claim("muP has the higher accuracy at every learning rate.", beats_everywhere("muP", "SP"))]
    panels = [[Panel("SP", "SP"), Panel("muP", "muP")]]
    return Experiment(parts, claims, drawing.transfer(panels), IMAGENET)


@recipe("imagenet-lr-width", "Appendix F.3, table", "The best learning rate does not shift (ResNet-50 on ImageNet)")
def lr_width(scale: Scale) -> Experiment:
    rates = (0.025, 0.05, 0.1, 0.2, 0.4)
    config = imagenet(scale)
    widths = scale.choose((1, 2), (1, 2), (2, 4, 8))
    part = study(scale, config, f"mup/{rescaled(0.001)}", widths=tuple(map(float, widths)), lr=rates, seeds=1)
    claims = [
        Claim("In muP the best learning rate is the same at every width.", stays("muP"), "0.2 at 0.5, 1 and 2"),
        Claim("In muP wider is better.", wider_is_better("muP"), "70.56, 75.92, 78.79"),
    ]
    return Experiment({"muP": part}, claims, drawing.transfer([[Panel("muP", "muP")]]), IMAGENET)
