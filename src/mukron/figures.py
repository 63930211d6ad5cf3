"""All figures in one style: colours that colour-blind eyes tell apart, a marker to each, SVG and PNG with a CSV beside.

Needs matplotlib, which is loaded when a figure is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib.util import find_spec
from math import isfinite, log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# Okabe and Ito (2008), without their yellow, which is too light for lines.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mukron",  # the same numbers give the same file
}


def available() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Whatever the function draws comes in the one style; the user's own settings stay as they were."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        if not available():
            raise ValueError("figures need matplotlib: pip install matplotlib, or mukron with its extra 'studies'")
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def panels(rows: int, columns: int, *, size: tuple[float, float] = (3.4, 2.8), **options: Any) -> tuple[Figure, Any]:
    """A figure of rows x columns axes, always as an array of two dimensions. No window, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def line(number: int) -> dict[str, Any]:
    """Colour and marker of the line of that number; after seven they come again, dashed."""
    around, which = divmod(number, len(COLOURS))
    return {"color": COLOURS[which], "marker": MARKERS[which], "linestyle": ("-", "--", ":", "-.")[around % 4]}


def shade(number: int, of: int) -> str:
    """Colours of an ordered quantity such as the width: from light to dark in one map."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis_r"](0.15 + 0.8 * number / max(1, of - 1)))


def widths_axis(axis: Axes, widths: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are the widths themselves, thinned where they would touch."""
    ticks = sorted(set(widths))[:: 1 + (len(set(widths)) - 1) // 7]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("width")


def sizes_axis(axis: Axes) -> None:
    """A logarithmic axis of at least two decades: flat lines look flat."""
    from matplotlib.ticker import NullFormatter

    if not isfinite(axis.dataLim.y1) or not isfinite(axis.dataLim.minposy):  # nothing to show
        return
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    missing = (2 / max(log10(high / low), 1e-9)) if high < 100 * low else 1.0
    middle, half = sqrt(low * high), sqrt(high / low) ** missing
    axis.set_ylim(middle / half, middle * half)
    axis.yaxis.set_minor_formatter(NullFormatter())


def powers_axis(axes: Axes, which: str) -> None:
    """The "x" or the "y" axis in powers of two, as settings are tried."""
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullLocator

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.set_major_formatter(LogFormatterMathtext(base=2))
    axis.set_minor_locator(NullLocator())


def numbers_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis from low to high in plain numbers, 0.1, 0.2, 0.5; linear where that says more."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not (0 < 2 * low < high):  # no logarithm, or so small a range that there is no difference
        margin = 0.05 * ((high - low) or abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)
        return
    ratio = high / low
    steps = (1, 1.5, 2, 3, 4, 5, 7) if ratio < 10 else (1, 2, 5) if ratio < 300 else (1,)
    axes.set_yscale("log")
    axes.set_ylim(low / ratio**0.05, high * ratio**0.05)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


@styled
def save(figure: Figure, path: str | Path, endings: Sequence[str] = (".svg", ".png")) -> list[Path]:
    """PATH.svg and PATH.png."""
    written = []
    for ending in endings:
        options: dict[str, Any] = {"metadata": {"Date": None}} if ending == ".svg" else {"dpi": 150}
        target = Path(path).with_suffix(ending)
        figure.savefig(target, bbox_inches="tight", pad_inches=0.05, **options)
        written.append(target)
    return written


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """PATH.csv, the numbers beside a figure; floats with nine digits, which float32 is told apart by."""
    target = Path(path).with_suffix(".csv")
    with target.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows([f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return target
