"""``mukron explain``: prints the theory, or the parametrization of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mukron.cli.common import ALL_METHODS_PLACEHOLDER, BUILT_IN, errors, show, split, value_of
from mukron.imports import default_width, import_function
from mukron.theory import METHODS, comparison_table, get_method, get_scheme, method_table

if TYPE_CHECKING:
    from mukron.params import Parametrization


def explain(
    method: Annotated[str, typer.Option(help=f"{ALL_METHODS_PLACEHOLDER}, or all.")] = "kfac",
    scheme: Annotated[str, typer.Option(help="mup, sp, ntk, or uniform:R with R from 0 (mup) to 1/2 (ntk).")] = "mup",
    model: Annotated[str | None, typer.Option(help=f"A built-in network: {BUILT_IN}.")] = None,
    factory: Annotated[
        str | None, typer.Option(help="Your own network: MODULE:FUNCTION, called with its width.")
    ] = None,
    width: Annotated[
        float | None, typer.Option(min=0, help="The width to explain (default: four times the base width).")
    ] = None,
    base_width: Annotated[float | None, typer.Option(min=0, help="The width that settings are tuned at.")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="The depth to explain, an argument of the network (needs --base-depth).")
    ] = None,
    base_depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The depth that settings are tuned at: explains residual blocks too, whose branches the network must "
            "multiply by base depth / depth.",
        ),
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option(
            help="The bound on a layer's move: none, spectral:SIZE, kl:KAPPA, graft:RULE or rms:SIZE.",
            show_default="spectral",
        ),
    ] = None,
    output_exponent: Annotated[str | None, typer.Option(help='b of the output weights, or "zero".')] = None,
    decay: Annotated[
        str | None,
        typer.Option(
            help="How learning rate times weight decay scales: constant, 1/width, or k for r_in^-k.",
            show_default="constant",
        ),
    ] = None,
    embedding_lr: Annotated[
        str | None, typer.Option(help="k: learning rates of embeddings times r_out^k.", show_default="0")
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument of the network, NAME=VALUE, as in tied=true; may be repeated."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="One row per parameter, even if rows are equal.")] = False,
) -> None:
    """Print how initial weights, learning rates and damping scale with the width and the depth, and why.

    Without a network it prints the theory, role by role. With --model or --factory it prints its parameters.
    """
    with errors():
        _know(method)
        if model is None and factory is None:
            of_networks = (width, base_width, depth, base_depth, output_exponent, decay, embedding_lr, role, trust)
            if any(of_networks) or settings:
                raise ValueError(
                    "a width, a depth, a trust, an output exponent, a decay, --embedding-lr, --role or --set needs a "
                    "network: --model NAME or --factory MODULE:FUNCTION"
                )
            show(comparison_table(scheme) if method == "all" else method_table(method, scheme))
            return
        from mukron.trust import USUAL

        methods = list(METHODS) if method == "all" else [method]
        get_scheme(scheme)  # reports a wrong name before a network is built
        if depth is not None and base_depth is None:
            raise ValueError("--depth needs --base-depth, the depth that settings are tuned at")
        depths = None if base_depth is None else (base_depth, depth or 4 * base_depth)
        chosen = {"output_exponent": output_exponent, "decay": decay, "embedding_lr": embedding_lr}
        laws = {name: value for name, value in chosen.items() if value is not None}
        plan = _plan(model, factory, width, base_width, depths, scheme, laws, role or [], settings or [])
        for name in methods:
            show(plan.explain(name, trust=USUAL if trust is None else trust, whole=whole))


def _know(method: str) -> None:
    """Load the optimizers if the method is unknown: they may register methods that ``mukron.theory`` does not have."""
    try:
        get_method(method)
    except ValueError:  # "all" too
        import mukron.optim  # noqa: F401


def _plan(
    model: str | None,
    factory: str | None,
    width: float | None,
    base_width: float | None,
    depths: tuple[int, int] | None,
    scheme: str,
    laws: dict[str, Any],
    roles: list[str],
    settings: list[str],
) -> Parametrization:
    """Parametrizes a network that is built on the meta device, so that any width can be explained."""
    from mukron.models import get_model
    from mukron.params import base_shapes, build_without_memory, parametrize, plain_width
    from mukron.params.building import at_depth

    if model is not None and factory is not None:
        raise ValueError("give --model or --factory, not both")
    if model is not None:
        entry = get_model(model)
        make, base_width = entry.factory, entry.base_width if base_width is None else base_width
    else:
        assert factory is not None
        make = import_function(factory, "--factory")
        base_width = default_width(make) if base_width is None else base_width
        if base_width is None:
            raise ValueError("--factory needs --base-width, the width that settings are tuned at")
    make = with_options(make, settings)
    declared = dict(split(role, "=", "--role", "NAME=ROLE, as in position=input") for role in roles)
    base_depth, depth = depths or (None, None)
    shapes = base_shapes(make, plain_width(base_width), depth=base_depth, roles=declared)
    factory_here = make if depth is None else at_depth(make, depth)
    network = build_without_memory(factory_here, plain_width(4 * base_width if width is None else width))
    return parametrize(network, shapes, scheme, **laws)


def with_options(make: Callable[..., Any], settings: list[str]) -> Callable[..., Any]:
    """Returns the network as a function of its width and depth, with its other arguments as NAME=VALUE."""
    if not settings:
        return make
    options = {}
    for setting in settings:
        name, value = split(setting, "=", "--set", "NAME=VALUE, as in tied=true")
        options[name] = value_of(value)

    def network(width: float, **depth: int) -> Any:
        try:
            return make(width, **{**options, **depth})
        except TypeError as error:
            raise ValueError(f"--set {' --set '.join(settings)}: {error}") from error

    return network
