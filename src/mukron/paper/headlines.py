"""What the paper's abstract claims, as questions to the recipes' claims: the head of the page and its matrix.

Nothing here is a result. A question names the claims that answer it, network by network, and the page reads verdicts
and effects off the stored outcomes. Caveats say how it was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ClaimName = tuple[str, str]  # a recipe and the text of one of its claims
NETWORKS = (
    "MLP",
    "MLP, torch's weights",
    "MLP, tanh",
    "MLP, cross-entropy",
    "MLP, tanh, cross-entropy",
    "CNN",
    "Myrtle-5",
    "ResNet-18",
    "CBOW",
)
_MLP, _TORCH, _TANH, _CROSS_ENTROPY, _TANH_CROSS_ENTROPY, _CNN, _MYRTLE5, _RESNET18, _CBOW = NETWORKS


@dataclass(frozen=True)
class AcrossNetworks:
    """A claim that is asked of several networks.

    Attributes:
        title: The claim.
        answers: By network, or by what else is asked, the claim of a recipe that answers it.
        brief: What tells it from the other questions of a headline.
    """

    title: str
    answers: Mapping[str, ClaimName]
    brief: str = ""


@dataclass(frozen=True)
class Headline:
    """A claim of the paper's abstract.

    Attributes:
        claim: The claim.
        questions: The questions that it comes down to.
        caveat: How they were asked, and what was not.
    """

    claim: str
    questions: tuple[AcrossNetworks, ...]
    caveat: str


def _transfer(claim: str) -> dict[str, ClaimName]:
    """Returns the claim on K-FAC of every network of the transfer figures."""
    return {
        _MLP: ("zero-transfer", f"MLP, K-FAC: {claim}"),
        _TORCH: ("zero-transfer-weights", f"MLP, K-FAC: {claim}"),
        _TANH: ("zero-transfer-activation", f"tanh, mse, K-FAC: {claim}"),
        _CROSS_ENTROPY: ("zero-transfer-activation", f"ReLU, cross-entropy, K-FAC: {claim}"),
        _TANH_CROSS_ENTROPY: ("zero-transfer-activation", f"tanh, cross-entropy, K-FAC: {claim}"),
        _CNN: ("zero-transfer-cnn", f"CNN, K-FAC: {claim}"),
        _RESNET18: ("zero-transfer-resnet18", f"ResNet-18, K-FAC: {claim}"),
    }


def _shampoo(claim: str) -> dict[str, ClaimName]:
    """Returns the claim on Shampoo of every network of its transfer figure."""
    recipes = {_MLP: "", _CNN: "-cnn", _MYRTLE5: "-myrtle5", _RESNET18: "-resnet18"}
    return {network: (f"shampoo-lr-transfer{ending}", claim) for network, ending in recipes.items()}


def _checked(method: str, claim: str, tanh_claim: str) -> dict[str, ClaimName]:
    """Returns the claim on the change of features of every coordinate check."""
    return {
        _MLP: ("coordinate", f"MLP, {method}: {claim}"),
        _TANH: ("dh-mlp-tanh", f"{method}: {tanh_claim}"),
        _MYRTLE5: ("coordinate-myrtle5", f"Myrtle-5, {method}: {claim}"),
    }


_DEPENDS = "in SP the change of features depends on the width."
KFAC_LEARNS = AcrossNetworks(
    "K-FAC, muP with the rescaled damping: features change alike at every width",
    _checked("K-FAC", "with the rescaled damping it does not.", "in muP with the rescaled damping it does not."),
    brief="K-FAC",
)
SHAMPOO_LEARNS = AcrossNetworks(
    "Shampoo, muP: features change alike at every width",
    _checked("Shampoo", "in muP it does not.", "in muP it does not."),
    brief="Shampoo",
)
KFAC_SP_DEPENDS = AcrossNetworks("K-FAC, SP: their change depends on the width", _checked("K-FAC", _DEPENDS, _DEPENDS))
SHAMPOO_SP_DEPENDS = AcrossNetworks(
    "Shampoo, SP: their change depends on the width",
    _checked("Shampoo", "in SP the change depends on the width.", "in SP it depends on the width."),
)
HEURISTIC_FAILS = AcrossNetworks(
    "K-FAC, muP with the heuristic damping: their change decays",
    _checked(
        "K-FAC",
        "muP's weights and learning rates with the heuristic damping are not enough: the features' change decays.",
        "with the heuristic damping it decays.",
    ),
    brief="features, heuristic",
)
RESCALED_VALID = AcrossNetworks(
    "K-FAC: the rescaled damping keeps its size beside every factor",
    {
        _MLP: ("coordinate", "MLP, K-FAC: the rescaled damping is valid: it keeps its size beside every factor."),
        _MYRTLE5: (
            "coordinate-myrtle5",
            "Myrtle-5, K-FAC: the rescaled damping is valid: it keeps its size beside every factor.",
        ),
    },
    brief="damping over factor, rescaled",
)
DAMPING_EXPONENTS_BEST = AcrossNetworks(
    "Fixed damping is best scaled with d_A = -1, d_B = 1",
    {
        f"{_MLP} (tuned at width 64)": (
            "k-fac-d-scale",
            "The damping that is best at width 64 is best for width 1024 if scaled with d_A = -1, d_B = 1.",
        ),
        f"{_MLP} (tuned at width 1024)": (
            "k-fac-d-scale",
            "With the damping tuned at width 1024 for each scaling, d_A = -1 and d_B = 1 is best.",
        ),
    },
    brief="(-1, 1) over the next best",
)
TABLE_1 = AcrossNetworks(
    "The exponents of Table 1",
    {"theory": ("abc-parametrization", "The conditions of muP give these exponents for SGD, Shampoo and K-FAC.")},
)
FIGURE_2 = AcrossNetworks(
    "Steps over gradients have them",
    {
        f"{layer} layer": (
            "k-fac-precond",
            f"The {layer} layer's step over its gradient goes as width^{power}, from the first epoch to the last.",
        )
        for layer, power in (("input", 1), ("hidden", 0), ("output", -1))
    },
)
KFAC_RATE = AcrossNetworks(
    "K-FAC, muP: the best learning rate stays",
    _transfer("in muP with the rescaled damping it stays."),
    brief="K-FAC",
)
KFAC_SP_RATE = AcrossNetworks("K-FAC, SP: it shifts", _transfer("in SP with the heuristic damping it shifts."))
SHAMPOO_RATE = AcrossNetworks(
    "Shampoo, muP: the best learning rate stays", _shampoo("In muP the best learning rate stays."), brief="Shampoo"
)
FOOF_RATE = AcrossNetworks(
    "FOOF, muP: the best learning rate stays",
    {name: ("foof-lr-transfer", f"{name}: in muP the best learning rate stays.") for name in (_MLP, _CNN)},
    brief="FOOF",
)
DAMPING_STAYS = AcrossNetworks(
    "K-FAC, muP: the best damping stays",
    {
        _MLP: ("mlp-damping-scaling", "MNIST: in muP with the rescaled rule it stays."),
        f"{_MLP} (Fashion-MNIST)": (
            "mlp-damping-scaling",
            "Fashion-MNIST: in muP with the rescaled rule it stays.",
        ),
        _CNN: ("k-fac-damping-transfer", "CNN: in muP with the rescaled rule it stays."),
    },
)
KFAC_ABOVE_SP = AcrossNetworks(
    "K-FAC: at the widest muP is better than SP, each at its best learning rate",
    _transfer("at the widest muP is better than SP, each at its best rate."),
    brief="learning rate tuned",
)
KFAC_ABOVE_SP_DAMPED = AcrossNetworks(
    "K-FAC: the same, each at its best damping",
    {
        network: (
            recipe,
            f"{name}: at the widest muP with the rescaled rule is better than SP, each at its best damping.",
        )
        for network, recipe, name in (
            (_MLP, "mlp-damping-scaling", "MNIST"),
            (f"{_MLP} (Fashion-MNIST)", "mlp-damping-scaling", "Fashion-MNIST"),
            (_CNN, "k-fac-damping-transfer", "CNN"),
        )
    },
    brief="damping tuned",
)
TABLE_3 = AcrossNetworks(
    "Table 3, CIFAR-100: muP has the higher accuracy",
    {
        f"{_RESNET18} ({method})": (
            "resnet-val-acc",
            f"ResNet-18, {method}: muP has the higher accuracy at large widths.",
        )
        for method in ("K-FAC", "Shampoo")
    },
)
SHAMPOO_ABOVE_SP = AcrossNetworks(
    "Shampoo: at the widest muP is better than SP",
    {
        **_shampoo("At the widest muP is better than SP."),
        _CBOW: ("training_curve-left", "At the widest muP is better than SP."),
    },
)
FOOF_ABOVE_SP = AcrossNetworks(
    "FOOF: at the widest muP is better than SP",
    {name: ("foof-lr-transfer", f"{name}: at the widest muP is better than SP.") for name in (_MLP, _CNN)},
)
KFAC_WIDER = AcrossNetworks("K-FAC, muP: wider is better", _transfer("in muP wider is better."))
KFAC_WIDER_THERE = AcrossNetworks(
    "K-FAC, muP: wider is better at one learning rate",
    _transfer("in muP wider is better at one learning rate, the narrowest's best."),
)
SHAMPOO_WIDER = AcrossNetworks("Shampoo, muP: wider is better", _shampoo("In muP wider is better."))
SHAMPOO_WIDER_THERE = AcrossNetworks(
    "Shampoo, muP: wider is better at one learning rate",
    _shampoo("In muP wider is better at one learning rate, the narrowest's best."),
)
ABOVE_HALF = AcrossNetworks(
    "K-FAC: b_L = 1 is better than 0.5",
    {
        name: (recipe, "K-FAC is better at b_L = 1 than at 0.5.")
        for name, recipe in ((_CNN, "nngp"), (_CBOW, "word2vec-b"))
    },
    brief="b_L = 1 over 0.5",
)
ABOVE_MANY = AcrossNetworks(
    "K-FAC: b_L = 1 is better than far above it",
    {
        _CNN: ("nngp", "K-FAC is worse where b_L is much above 1 than at 1."),
        _CBOW: ("word2vec-b", "K-FAC is better at b_L = 1 than far above it."),
    },
    brief="b_L = 1 over 64",
)
TO_THE_KERNEL = AcrossNetworks(
    "K-FAC: far above 1 it falls to the kernel's solution",
    {
        _CNN: (
            "nngp",
            "K-FAC falls to the kernel's solution where b_L is much above 1: its accuracy, within 3 points.",
        ),
        f"{_CNN} (with eps)": (
            "nngp-eps",
            "K-FAC at b_L = 64 with eps = 1e-06 has the kernel's accuracy at the first 5 steps: within 3 points.",
        ),
    },
    brief="b_L = 64 over the kernel",
)
CLAIMS_BY_NETWORK = (
    *(KFAC_LEARNS, SHAMPOO_LEARNS, KFAC_SP_DEPENDS, SHAMPOO_SP_DEPENDS, HEURISTIC_FAILS, RESCALED_VALID),
    DAMPING_EXPONENTS_BEST,
    *(KFAC_RATE, KFAC_SP_RATE, SHAMPOO_RATE, FOOF_RATE, DAMPING_STAYS),
    *(KFAC_ABOVE_SP, KFAC_ABOVE_SP_DAMPED, SHAMPOO_ABOVE_SP, FOOF_ABOVE_SP, TABLE_3),
    *(KFAC_WIDER, KFAC_WIDER_THERE, SHAMPOO_WIDER, SHAMPOO_WIDER_THERE),
    *(ABOVE_HALF, ABOVE_MANY, TO_THE_KERNEL),
)
ABSTRACT_CLAIMS = (
    Headline(
        "One parametrization keeps feature learning stable as the width grows",
        (KFAC_LEARNS, SHAMPOO_LEARNS),
        "Ten steps at one small learning rate, from torch's own initial weights. Myrtle-5 has four widths, so its "
        "intervals are wide.",
    ),
    Headline(
        "It fixes how initial weights and learning rates scale",
        (TABLE_1, FIGURE_2),
        "The table is derived, not measured; the figure measures it for K-FAC in one MLP.",
    ),
    Headline(
        "K-FAC's damping has to be rescaled, the usual heuristic is not enough",
        (HEURISTIC_FAILS, RESCALED_VALID, DAMPING_EXPONENTS_BEST),
        "The heuristic at one number, rho = 0.001. The numbers of the fixed damping lie at an edge of their grid.",
    ),
    Headline(
        "K-FAC generalizes better in muP than in SP",
        (KFAC_ABOVE_SP, KFAC_ABOVE_SP_DAMPED),
        "SP has the heuristic damping and muP the rescaled one, as in the paper: what the damping contributes and what "
        "the parametrization is not separated. The learning rate is tuned at one number of the damping, or the other "
        "way round.",
    ),
    Headline(
        "Shampoo generalizes better in muP than in SP",
        (SHAMPOO_ABOVE_SP,),
        "Narrow networks: up to 1,024 units, 64 channels or twice the base width. Two seeds; ResNet-18 and CBOW one. "
        "CBOW at one learning rate.",
    ),
    Headline(
        "The gain is that of feature learning: with K-FAC, other scales of the output layer are worse",
        (ABOVE_HALF, ABOVE_MANY, TO_THE_KERNEL),
        "CNN: 32 channels, 5 seeds. CBOW: one epoch, one seed.",
    ),
    Headline(
        "The learning rate transfers across widths",
        (KFAC_RATE, SHAMPOO_RATE, FOOF_RATE),
        "Powers of two, or of four. CNN, Myrtle-5 and ResNet-18 have two or three widths, too few to exclude a drift "
        "of a quarter of a power of two per doubling.",
    ),
    Headline(
        "The damping transfers across widths",
        (DAMPING_STAYS,),
        "Powers of four; MLP 2 seeds, CNN 5. At one learning rate.",
    ),
)
