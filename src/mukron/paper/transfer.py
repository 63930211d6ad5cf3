"""Does the best learning rate stay where it is? The paper's transfer figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mukron.paper import drawing
from mukron.paper.claims import BestOf, ClaimCheck, beats, revised
from mukron.paper.drawing import Panel
from mukron.paper.networks import CNN_NETWORK, MLP_NETWORK, MYRTLE_NETWORK, RESNET_NETWORK, Network
from mukron.paper.optima import ASKED_STRICTLY, moves, outperforms, stays
from mukron.paper.recipe import Claim, Experiment, Part, Scale, recipe
from mukron.paper.settings import (
    BASE,
    FLOOR,
    GRID,
    MOMENTUM,
    NORMAL,
    SEEDS,
    TORCHS,
    WEIGHTS,
    heuristic,
    powers,
    rescaled,
    roots,
    study,
)
from mukron.paper.widths import wider_is_better, wider_is_better_there, wider_is_worse, wider_is_worse_there

CHOICES = (MOMENTUM, GRID, SEEDS, BASE, FLOOR)
PANELS_IN_A_ROW = 2
SEVERAL = 2  # seeds at paper scale; of ResNet-18, whose runs are long, one


@dataclass(frozen=True)
class Column:
    """A panel: a method in a scheme, and the learning rates that are tried."""

    title: str
    method: str
    scheme: str
    rates: tuple[float, ...]
    fields: Mapping[str, Any] | None = None


def part(scale: Scale, network: Network, column: Column, **fields: Any) -> Part:
    config = network.config(scale, method=column.method, **(column.fields or {}), **fields)
    deep = network.name == "ResNet-18"
    rates = column.rates[::2] if deep and scale is Scale.SMALL else column.rates
    seeds = 1 if deep else SEVERAL
    several = 2 if network.fields["model"] == "mlp" else 1
    return study(
        scale, config, column.scheme, widths=network.of(scale), lr=rates, seeds=scale.choose(1, several, seeds)
    )


Row = tuple[str, Network, Sequence[Column], Mapping[str, Any]]  # a name, what it trains, how, and with what changes


def grid(scale: Scale, rows: Sequence[Row]) -> tuple[dict[str, Part], list[list[Panel]]]:
    """Parts and panels of rows of networks and columns of methods."""
    parts: dict[str, Part] = {}
    panels = []
    for name, network, columns, fields in rows:
        row = [Panel(f"{name}: {column.title}", f"{name}, {column.title}") for column in columns]
        panels += [row[start : start + PANELS_IN_A_ROW] for start in range(0, len(row), PANELS_IN_A_ROW)]
        for column in columns:
            parts[f"{name}, {column.title}"] = part(scale, network, column, **fields)
    return parts, panels


def four(rates: Mapping[str, tuple[float, ...]], rho_sp: float, rho_mup: float) -> list[Column]:
    """SGD and K-FAC, in SP and in muP."""
    return [
        Column("SGD, SP", "sgd", "sp", rates["SGD, SP"]),
        Column("SGD, muP", "sgd", "mup", rates["SGD, muP"]),
        Column("K-FAC, SP", "kfac", f"sp/{heuristic(rho_sp)}", rates["K-FAC, SP"]),
        Column("K-FAC, muP", "kfac", f"mup/{rescaled(rho_mup)}", rates["K-FAC, muP"]),
    ]


MLP_RATES = {
    "SGD, SP": powers(-13, -4),
    "SGD, muP": powers(-9, -2),
    "K-FAC, SP": powers(-12, -4),
    "K-FAC, muP": powers(-8, -1),
}
CNN_RATES = {
    "SGD, SP": powers(-15, -7),
    "SGD, muP": powers(-14, -7),
    "K-FAC, SP": powers(-8, 0),
    "K-FAC, muP": powers(-2, 5),
}
RESNET_RATES = {
    "SGD, SP": powers(-9, -2),
    "SGD, muP": powers(-9, -2),
    "K-FAC, SP": powers(-3, 3),
    "K-FAC, muP": powers(-7, -1),
}


def transfer_claims(name: str, tried: str = "") -> list[Claim]:
    sgd = [
        Claim(
            f"{name}, SGD: in SP the best learning rate falls with the width.", moves(f"{name}, SGD, SP", direction=-1)
        ),
        Claim(f"{name}, SGD: in muP it stays.", stays(f"{name}, SGD, muP")),
    ]
    return [*sgd, *kfac_claims(name, tried)]


def kfac_claims(name: str, tried: str = "") -> list[Claim]:
    sp, mup = f"{name}, K-FAC, SP", f"{name}, K-FAC, muP"
    return [
        Claim(f"{name}, K-FAC: in SP with the heuristic damping it shifts.", moves(sp)),
        Claim(f"{name}, K-FAC: in muP with the rescaled damping it stays.", stays(mup), tried=tried),
        Claim(f"{name}, K-FAC: in muP wider is better.", wider_is_better(mup)),
        Claim(
            f"{name}, K-FAC: in muP wider is better at one learning rate, the narrowest's best.",
            wider_is_better_there(mup),
        ),
        Claim(f"{name}, K-FAC: at the widest muP is better than SP, each at its best rate.", outperforms(mup, sp)),
    ]


def sp_gets_worse(name: str) -> list[Claim]:
    sp = f"{name}, K-FAC, SP"
    return [
        Claim(
            f"{name}, K-FAC: in SP test accuracy at the widest is lower than at the narrowest, each at its best rate.",
            wider_is_worse(sp),
        ),
        Claim(
            f"{name}, K-FAC: in SP it is lower at the widest for a fixed learning rate, the best of the narrowest.",
            wider_is_worse_there(sp),
        ),
    ]


def compared(better: str, worse: str, or_equals: bool = False) -> ClaimCheck:
    """Asks whether one is better at the widest; ``or_equals`` was the earlier rule where it counted as better."""
    return revised(outperforms(better, worse), beats(BestOf(better), BestOf(worse), or_equals), ASKED_STRICTLY)


@recipe("zero-transfer", "Figure 6, row 1", "muP allows the learning rate to transfer across widths: MLP on MNIST")
def zero_transfer(scale: Scale) -> Experiment:
    made = one_row(scale, MLP_NETWORK, four(MLP_RATES, 0.001, 1))
    return dataclasses.replace(made, claims=[*sp_gets_worse("MLP"), *made.claims])


@recipe("zero-transfer-weights", "Ours, beside Figure 6", "K-FAC from torch's own initial weights: MLP on MNIST")
def other_weights(scale: Scale) -> Experiment:
    """Ours: how SP fares depends on the initial weights, whose deviation the paper leaves open."""
    mlp = dataclasses.replace(MLP_NETWORK, fields={**MLP_NETWORK.fields, "model_options": {}})
    columns = four({**MLP_RATES, "K-FAC, SP": powers(-12, -4), "K-FAC, muP": powers(-9, -2)}, 0.001, 1)[2:]
    parts, panels = grid(scale, [("MLP", mlp, columns, {})])
    claims = [dataclasses.replace(claim, ours=True) for claim in (*sp_gets_worse("MLP"), *kfac_claims("MLP"))]
    own = "Not in the paper. Initial weights: torch's own, uniform with a third of the variance."
    return Experiment(parts, claims, drawing.transfer(panels), (own, *mlp.choices, *CHOICES))


@recipe("zero-transfer-cnn", "Figure 6, row 2", "The same: CNN on Fashion-MNIST")
def zero_transfer_cnn(scale: Scale) -> Experiment:
    return one_row(scale, CNN_NETWORK, four(CNN_RATES, 1, 100), tried=f"{TORCHS}the same.")


@recipe("zero-transfer-resnet18", "Figure 6, row 3", "The same: ResNet-18 on Fashion-MNIST")
def zero_transfer_resnet(scale: Scale) -> Experiment:
    return one_row(scale, RESNET_NETWORK, four(RESNET_RATES, 10, 10))


def one_row(scale: Scale, network: Network, columns: Sequence[Column], tried: str = "") -> Experiment:
    """SGD and K-FAC, in SP and in muP."""
    parts, panels = grid(scale, [(network.name, network, columns, {})])
    choices = (*network.choices, *CHOICES)
    return Experiment(parts, transfer_claims(network.name, tried=tried), drawing.transfer(panels), choices)


def _rates(*ends: tuple[int, int]) -> dict[str, tuple[float, ...]]:
    return {name: powers(*each) for name, each in zip(MLP_RATES, ends, strict=True)}


@recipe("zero-transfer-activation", "Appendix F.4, figure", "Learning rate transfer with tanh and with cross-entropy")
def activation(scale: Scale) -> Experiment:
    narrower = Network("MLP", MLP_NETWORK.fields, powers(9, 13, 2), MLP_NETWORK.small, MLP_NETWORK.smoke)
    tanh = {"model_options": {**NORMAL, "activation": "tanh"}}
    rows: list[Row] = [
        ("tanh, mse", narrower, four(_rates((-12, -4), (-9, -2), (-12, -3), (-8, 0)), 0.001, 1), tanh),
        (
            "tanh, cross-entropy",
            narrower,
            four(_rates((-9, 0), (-5, 2), (-12, -4), (-12, -4)), 0.001, 1),
            {**tanh, "loss": "cross-entropy"},
        ),
        (
            "ReLU, cross-entropy",
            narrower,
            four(_rates((-10, -1), (-8, -1), (-13, -5), (-12, -4)), 0.001, 1),
            {"loss": "cross-entropy"},
        ),
    ]
    parts, panels = grid(scale, rows)
    claims = [claim for name, *_ in rows for claim in transfer_claims(name)]
    choices = ("Widths: 512, 2048 and 8192.", *MLP_NETWORK.choices, *CHOICES)
    return Experiment(parts, claims, drawing.transfer(panels), choices)


@recipe("zero-transfer-full", "Appendix F.3, figure", "The same on the whole of Fashion-MNIST")
def full(scale: Scale) -> Experiment:
    whole = {"samples": None, "batch": 1024, "data": "fashion-mnist"}
    mlp = Network("MLP", {**MLP_NETWORK.fields, **whole}, powers(9, 12), powers(6, 7), MLP_NETWORK.smoke)
    cnn = Network("CNN", {**CNN_NETWORK.fields, **whole, "epochs": 20}, (16, 32, 64), (16,), CNN_NETWORK.smoke)
    few = {name: rates[::2] for name, rates in MLP_RATES.items()}
    few_cnn = {name: rates[::2] for name, rates in CNN_RATES.items()}
    parts, panels = grid(scale, [("MLP", mlp, four(few, 0.001, 1), {}), ("CNN", cnn, four(few_cnn, 1, 100), {})])
    claims = [
        Claim(f"{name}, {method}: in muP the best learning rate stays.", stays(f"{name}, {method}, muP"))
        for name in ("MLP", "CNN")
        for method in ("SGD", "K-FAC")
    ]
    for name in ("MLP", "CNN"):
        sp, mup = f"{name}, K-FAC, SP", f"{name}, K-FAC, muP"
        claims += [
            Claim(f"{name}, K-FAC: in SP the heuristic damping prevents it.", moves(sp)),
            Claim(f"{name}, K-FAC: at the widest muP is better than SP, each at its best rate.", outperforms(mup, sp)),
        ]
    choices = ("Epochs and batch size: not given; 20 and 1,024.", WEIGHTS, *CHOICES)
    return Experiment(parts, claims, drawing.transfer(panels), choices)


def shampoo_transfer(
    scale: Scale, network: Network, widths: tuple[float, ...], rates: tuple[float, ...], every: int = 1
) -> Experiment:
    """SP and muP; the roots renewed ``every`` so many steps."""
    newton = {"method_options": {"solver": roots(scale), "inverse_every": every}}
    exact = Network(network.name, {**network.fields, "dtype": "float32"}, widths, network.small, network.smoke)
    columns = [
        Column(title, "shampoo", f"{scheme}/max-eigenvalue:0.001", rates, newton)
        for title, scheme in (("SP", "sp"), ("muP", "mup"))
    ]
    name = network.name
    parts, panels = grid(scale, [(name, exact, columns, {})])
    claims = [
        Claim("In SP the best learning rate is stable too.", stays(f"{name}, SP")),
        Claim("In muP the best learning rate stays.", stays(f"{name}, muP")),
        Claim("In muP wider is better.", wider_is_better(f"{name}, muP")),
        Claim(
            "In muP wider is better at one learning rate, the narrowest's best.", wider_is_better_there(f"{name}, muP")
        ),
        Claim("At the widest muP is better than SP.", compared(f"{name}, muP", f"{name}, SP", or_equals=True)),
    ]
    choices = (
        "Damping: not given for this figure; 0.001 times the largest eigenvalue, as for Figure 3.",
        f"Roots by Newton's iteration, renewed every {every} step{'s' if every > 1 else ''}.",
        "Widths: the roots of Shampoo's matrices cost the cube of the width, hence narrower ones than for K-FAC.",
        *(*network.choices, MOMENTUM, GRID, SEEDS, BASE),
    )
    return Experiment(parts, claims, drawing.transfer(panels), choices)


@recipe("shampoo-lr-transfer", "Appendix F.1, figure", "muP for Shampoo, learning rate transfer: MLP on MNIST")
def shampoo_mlp(scale: Scale) -> Experiment:
    return shampoo_transfer(scale, MLP_NETWORK, powers(7, 10), powers(-8, 1))


@recipe("shampoo-lr-transfer-cnn", "Appendix F.1, figure", "The same: CNN on Fashion-MNIST")
def shampoo_cnn(scale: Scale) -> Experiment:
    return shampoo_transfer(scale, CNN_NETWORK, (16, 32), powers(-9, -1), every=5)


@recipe("shampoo-lr-transfer-myrtle5", "Appendix F.1, figure", "The same: Myrtle-5 on Fashion-MNIST")
def shampoo_myrtle(scale: Scale) -> Experiment:
    return shampoo_transfer(scale, MYRTLE_NETWORK, (16, 32, 64), powers(-9, -1, 2))


@recipe("shampoo-lr-transfer-resnet18", "Appendix F.1, figure", "The same: ResNet-18 on Fashion-MNIST")
def shampoo_resnet(scale: Scale) -> Experiment:
    return shampoo_transfer(scale, RESNET_NETWORK, (1, 2), powers(-10, -2, 2), every=10)


@recipe("foof-lr-transfer", "Appendix F.2, figure", "muP for FOOF: learning rate transfer")
def foof(scale: Scale) -> Experiment:
    def columns(rho: float, sp: tuple[float, ...], mup: tuple[float, ...]) -> list[Column]:
        return [
            Column("SP", "foof", f"sp/{rescaled(rho)}", sp),
            Column("muP", "foof", f"mup/{rescaled(rho)}", mup),
        ]

    mlp = Network("MLP", MLP_NETWORK.fields, powers(9, 13), MLP_NETWORK.small, MLP_NETWORK.smoke)
    rows: list[Row] = [
        ("MLP", mlp, columns(1, powers(-5, 2), powers(-6, 1)), {}),
        ("CNN", CNN_NETWORK, columns(1, powers(-10, -1), powers(-10, -1)), {}),
    ]
    parts, panels = grid(scale, rows)
    claims = [
        claim
        for name, *_ in rows
        for claim in (
            Claim(f"{name}: in muP the best learning rate stays.", stays(f"{name}, muP")),
            Claim(f"{name}: at the widest muP is better than SP.", compared(f"{name}, muP", f"{name}, SP")),
        )
    ]
    choices = ("Damping: not given; the rescaled rule with 1.", *MLP_NETWORK.choices, *CHOICES)
    return Experiment(parts, claims, drawing.transfer(panels), choices)


@recipe("zero-transfer-up", "Appendix I, figure", "The uniform parametrization transfers, and is worse than muP")
def uniform_transfer(scale: Scale) -> Experiment:
    mlp = Network("MLP", MLP_NETWORK.fields, powers(9, 13), MLP_NETWORK.small, MLP_NETWORK.smoke)
    columns = [
        Column("SGD, UP", "sgd", "ntk", powers(-8, -1)),
        Column("SGD, muP", "sgd", "mup", MLP_RATES["SGD, muP"]),
        Column("K-FAC, UP", "kfac", f"ntk/{rescaled(1)}", powers(-8, 0)),
        Column("K-FAC, muP", "kfac", f"mup/{rescaled(1)}", MLP_RATES["K-FAC, muP"]),
    ]
    parts, panels = grid(scale, [("MLP", mlp, columns, {})])
    claims = [
        Claim(
            f"{method}: in UP the best learning rate stays.",
            stays(f"MLP, {method}, UP"),
            tried=f"{TORCHS}K-FAC's grows with the width too.",
        )
        for method in ("SGD", "K-FAC")
    ] + [
        Claim(
            f"{method}: at the widest UP is worse than muP.",
            compared(f"MLP, {method}, muP", f"MLP, {method}, UP"),
        )
        for method in ("SGD", "K-FAC")
    ]
    choices = (
        "UP: r = 1/2, the NTK parametrization, with the rescaled damping for K-FAC.",
        *MLP_NETWORK.choices,
        *CHOICES,
    )
    return Experiment(parts, claims, drawing.transfer(panels), choices)


@recipe("gauss-newton-transfer", "Appendix A.4.3", "Gauss-Newton, which the paper derives and does not run: transfer")
def gauss_newton(scale: Scale) -> Experiment:
    fields = {**MLP_NETWORK.fields, "samples": 128, "test_samples": 2000, "model_options": {}}
    mlp = Network("MLP", fields, powers(7, 11), powers(6, 8), MLP_NETWORK.smoke)
    columns = [
        Column("SP", "gauss-newton", "sp/rescaled", powers(-9, 0)),
        Column("muP", "gauss-newton", "mup/rescaled", powers(-9, 0)),
    ]
    parts, panels = grid(scale, [("MLP", mlp, columns, {})])
    claims = [
        Claim("In muP the best learning rate stays.", stays("MLP, muP"), ours=True),
        Claim("In muP wider is better.", wider_is_better("MLP, muP"), ours=True),
        Claim("At the widest muP is better than SP.", compared("MLP, muP", "MLP, SP", or_equals=True), ours=True),
    ]
    choices = (
        "The paper has no experiment: 128 samples of MNIST, 20 epochs, full batch; mukron's own damping.",
        MOMENTUM,
    )
    return Experiment(parts, claims, drawing.transfer(panels), choices)
