"""The recipes on word embeddings: CBOW on WikiText-2."""

from __future__ import annotations

from typing import Any

from mukron.paper import drawing, earlier
from mukron.paper.claims import BestOf, ClaimCheck, alike, beats, revised
from mukron.paper.drawing import ExponentPanel, Panel
from mukron.paper.recipe import Claim, Experiment, Part, Scale, recipe
from mukron.paper.settings import BASE, FLOOR, MOMENTUM, powers, rescaled, setting, study
from mukron.paper.widths import wider_is_better, wider_is_worse, wider_throughout
from mukron.study.design import Design

CBOW_CHOICES = (
    "Epochs, batch size, window and widths: not given; 5 epochs in batches of 4,096, four words on either side.",
    "tau is not defined in the paper; 0.1 is read as the weight of the newest batch in the average of the factors.",
    "Roots and inverses are renewed every 5 steps (with 20 the first batch's drive the run apart), factors at each.",
    "Side of the head's 1,689 words, which does not grow: kept results have Shampoo's diagonal; now it has no factor "
    "there.",
    *(MOMENTUM, BASE),
)
MULTIPLIERS_RULE = (
    "Earlier, one pair of multipliers was compared. Now the best of all that were run is taken at each b_L, as the "
    "paper tunes them."
)
ANALOGY, SIMILARITY = "words/analogy_accuracy", "words/similarity"
CBOW_EPOCHS, CBOW_BATCH = 5, 4096


def cbow(scale: Scale, method: str, epochs: int = CBOW_EPOCHS, **fields: Any) -> Any:
    """Returns the configuration of CBOW with the method's options."""
    options = {
        "shampoo": {"memory": "ema:0.9", "inverse_every": 5, "max_size": 1500},
        "kfac": {"memory": "ema:0.9", "inverse_every": 5},
    }
    config = setting(
        scale,
        **{"model": "cbow", "data": "wikitext2", "loss": "cross-entropy", "method": method, "batch": CBOW_BATCH},
        **{"epochs": epochs, "momentum": 0.9, "record": ("words",), "evaluate_every": epochs},
        **{"method_options": options[method], "test_samples": 16_384, **fields},
    )
    return config.replace(samples=131_072, epochs=1) if scale is Scale.SMALL else config


def metric_of(scale: Scale) -> str:
    """Returns the metric: the accuracy of analogies, which the synthetic text of smoke runs does not have."""
    return "test_accuracy" if scale is Scale.SMOKE else ANALOGY


@recipe("training_curve-left", "Figure 4, left", "CBOW on WikiText-2 with Shampoo over widths")
def cbow_widths(scale: Scale) -> Experiment:
    sizes = scale.choose((64, 128), (64, 128, 256), powers(6, 10))
    parts: dict[str, Part] = {}
    for title, scheme in (("SP", "sp"), ("muP", "mup")):
        parts[title] = study(
            scale,
            cbow(scale, "shampoo"),
            f"{scheme}/max-eigenvalue:1e-6",
            widths=tuple(map(float, sizes)),
            lr=(0.1,),
            seeds=1,
            metric=metric_of(scale),
        )
    claims = [
        Claim("In SP the accuracy of word analogies falls as the width grows.", wider_is_worse("SP")),
        Claim("In muP it does not fall.", wider_is_better("muP", strictly=False)),
        Claim("At the widest muP is better than SP.", beats(BestOf("muP"), BestOf("SP"))),
        Claim("In muP the training loss is lower the wider, throughout.", wider_throughout("muP", "train_loss")),
    ]
    if scale is not Scale.SMOKE:
        claims.append(
            Claim(
                "At the widest the correlation with WordSim-353 is higher in muP than in SP.",
                beats(BestOf("muP", metric=SIMILARITY), BestOf("SP", metric=SIMILARITY)),
            )
        )
    second, name = ("train_loss", "training loss") if scale is Scale.SMOKE else (SIMILARITY, "WordSim-353, correlation")
    panels = [
        [Panel(title, title) for title in parts],
        [Panel(f"{title}: training loss", title, quantity="train_loss") for title in parts],
        [Panel(f"{title}: {name}", title, quantity=second) for title in parts],
    ]
    return Experiment(parts, claims, drawing.over_epochs(panels), CBOW_CHOICES)


@recipe("word2vec-b", "Appendix E.5, figure", "The effect of b_L on the accuracy of word analogies")
def output_exponent(scale: Scale) -> Experiment:
    exponents = scale.choose((0.5, 1.0), (0.5, 1.0, 64.0), (0.5, 1.0, 1.5, 2.0, 64.0))
    embeddings, outputs = (1.0,), scale.choose((1.0,), (1.0,), (1.0, 4.0))
    schemes = {"Shampoo": ("shampoo", "mup/max-eigenvalue:1e-6"), "K-FAC": ("kfac", f"mup/{rescaled(1)}")}
    parts: dict[str, Part] = {}
    for title, (method, scheme) in schemes.items():
        for b in exponents:
            for embedding in embeddings:
                for output in outputs:
                    options = {"embedding": embedding, "output": output}
                    config = cbow(scale, method, 1, output_exponent=f"{b:g}", model_options=options)
                    parts[cbow_part_name(title, b, embedding, output)] = _tuned(scale, config, scheme)

    def first_of(title: str, b: float) -> BestOf:
        """With the first multipliers alone, as claims were judged earlier."""
        return BestOf(cbow_part_name(title, b, embeddings[0], outputs[0]), name=f"{title}, b_L = {b:g}:")

    def best_of(title: str, b: float) -> BestOf:
        first, *rest = (cbow_part_name(title, b, embedding, output) for embedding in embeddings for output in outputs)
        return BestOf(first, name=f"{title}, b_L = {b:g}:", among=tuple(rest))

    def better_at_one(b: float) -> ClaimCheck:
        tuned, fixed = (beats(of("K-FAC", 1.0), of("K-FAC", b)) for of in (best_of, first_of))
        return revised(tuned, fixed, MULTIPLIERS_RULE)

    claims = [Claim("K-FAC is better at b_L = 1 than at 0.5.", better_at_one(0.5))]
    if 64.0 in exponents:
        above = [b for b in exponents if b > 1]
        claims += [
            Claim("K-FAC is better at b_L = 1 than far above it.", better_at_one(64.0)),
            Claim(
                "Shampoo is about as good at every b_L above 1 as at 1: within 5 points.",
                revised(
                    alike(best_of("Shampoo", 1.0), [best_of("Shampoo", b) for b in above], 0.05),
                    earlier.close(first_of("Shampoo", 1.0), first_of("Shampoo", 64.0), 0.05),
                    f"{MULTIPLIERS_RULE} Earlier only b_L = 64 was compared with 1, whatever the noise.",
                ),
            ),
        ]
    panels = [
        ExponentPanel(
            f"{title}, embedding x {embedding:g}, output x {output:g}",
            {b: cbow_part_name(title, b, embedding, output) for b in exponents},
        )
        for title in schemes
        for embedding in embeddings
        for output in outputs
    ]
    choices = (
        "Width 256, base width 64; one epoch. Of the paper's multipliers: embedding 1, output 1 and 4.",
        FLOOR,
        *CBOW_CHOICES,
    )
    return Experiment(parts, claims, drawing.over_exponent(panels), choices)


def cbow_part_name(title: str, b: float, embedding: float, output: float) -> str:
    """Returns the name of a part from its method, b_L and the multipliers of embedding and output."""
    return f"{title}, b_L = {b:g}, embedding x {embedding:g}, output x {output:g}"


def _tuned(scale: Scale, config: Any, scheme: str) -> Design:
    width = scale.choose(128.0, 128.0, 256.0)
    return study(scale, config, scheme, widths=(width,), lr=(1e-4, 1e-3, 1e-2, 0.1), seeds=1, metric=metric_of(scale))
