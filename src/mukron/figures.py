"""The common style of all figures, and how they are saved.

Colours can be told apart by colour-blind readers, and each has its marker. Figures are saved as SVG and PNG, with
their numbers as CSV. This module needs matplotlib, which is loaded when a figure is drawn.
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

# The palette of Okabe and Ito (2008) without yellow, which is too light for lines.
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
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "mukron",  # make the file reproducible
}


def available() -> bool:
    """Say whether matplotlib is installed, so that figures can be drawn.

    Returns:
        Whether it is.

    Example:
        >>> from mukron.figures import available
        >>> available()
        True
    """
    return find_spec("matplotlib") is not None


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that draws, so that it draws in the common style.

    The user's settings of matplotlib are left as they were.

    Args:
        draw: The function.

    Returns:
        The function in the common style. It raises a ``ValueError`` if matplotlib is not installed.

    Example:
        >>> import matplotlib
        >>> from mukron.figures import styled
        >>> styled(lambda: matplotlib.rcParams["font.size"])()
        9.0
    """

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        if not available():
            raise ValueError("figures need matplotlib: pip install matplotlib, or mukron with its extra 'studies'")
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return draw_in_style


def panels(rows: int, columns: int, *, size: tuple[float, float] = (3.4, 2.8), **options: Any) -> tuple[Figure, Any]:
    """Make a figure of rows x columns panels, without a window and without matplotlib's global state.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        size: The width and height of one panel in inches.
        **options: Arguments of ``Figure.subplots``, such as ``sharex``.

    Returns:
        The figure, and its axes as an array [rows, columns].

    Example:
        >>> from mukron.figures import panels
        >>> figure, axes = panels(1, 2)
        >>> axes.shape
        (1, 2)
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def line(number: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of a line. Every seven lines the colours repeat with other dashes.

    Args:
        number: The number of the line, from 0.

    Returns:
        Arguments of ``Axes.plot``.

    Example:
        >>> from mukron.figures import line
        >>> line(0)
        {'color': '#0072B2', 'marker': 'o', 'linestyle': '-'}
    """
    cycle, index = divmod(number, len(COLOURS))
    return {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": ("-", "--", ":", "-.")[cycle % 4]}


def shade(number: int, of: int) -> str:
    """Return a colour for a value of an ordered quantity such as the width: light for the first, dark for the last.

    Args:
        number: The position of the value, from 0.
        of: The number of values.

    Returns:
        The colour as ``#rrggbb``.

    Example:
        >>> from mukron.figures import shade
        >>> shade(0, 3), shade(2, 3)
        ('#9bd93c', '#471365')
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis_r"](0.15 + 0.8 * number / max(1, of - 1)))


def widths_axis(axis: Axes, widths: Sequence[float]) -> None:
    """Make the x axis logarithmic, with the widths themselves as ticks; where there are many, some are left out.

    Args:
        axis: The axes to change.
        widths: The widths.

    Example:
        >>> from mukron.figures import panels, widths_axis
        >>> figure, axes = panels(1, 1)
        >>> widths_axis(axes[0, 0], [64, 128, 256])
        >>> [label.get_text() for label in axes[0, 0].get_xticklabels()]
        ['64', '128', '256']
    """
    ticks = sorted(set(widths))[:: 1 + (len(set(widths)) - 1) // 7]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("width")


def sizes_axis(axis: Axes) -> None:
    """Make the y axis logarithmic over at least two decades, so that flat lines look flat.

    Args:
        axis: The axes to change, with the lines already drawn.

    Example:
        >>> from mukron.figures import panels, sizes_axis
        >>> figure, axes = panels(1, 1)
        >>> _ = axes[0, 0].plot([1, 2], [1.0, 1.1])
        >>> sizes_axis(axes[0, 0])
        >>> low, high = axes[0, 0].get_ylim()
        >>> round(high / low)
        100
    """
    from matplotlib.ticker import NullFormatter

    if not isfinite(axis.dataLim.y1) or not isfinite(axis.dataLim.minposy):  # nothing is drawn
        return
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    stretch = (2 / max(log10(high / low), 1e-9)) if high < 100 * low else 1.0
    centre, half = sqrt(low * high), sqrt(high / low) ** stretch
    axis.set_ylim(centre / half, centre * half)
    axis.yaxis.set_minor_formatter(NullFormatter())


def powers_axis(axes: Axes, which: str) -> None:
    """Make an axis logarithmic with ticks at powers of two, as for learning rates and damping.

    Args:
        axes: The axes to change.
        which: ``"x"`` or ``"y"``.

    Example:
        >>> from mukron.figures import panels, powers_axis
        >>> figure, axes = panels(1, 1)
        >>> powers_axis(axes[0, 0], "x")
        >>> axes[0, 0].get_xscale()
        'log'
    """
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullLocator

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.set_major_formatter(LogFormatterMathtext(base=2))
    axis.set_minor_locator(NullLocator())


def numbers_axis(axes: Axes, low: float, high: float) -> None:
    """Make the y axis logarithmic with plain numbers as ticks (0.1, 0.2, 0.5); linear if the range is small.

    Args:
        axes: The axes to change.
        low: The lowest value to show.
        high: The highest value to show.

    Example:
        >>> from mukron.figures import numbers_axis, panels
        >>> figure, axes = panels(1, 2)
        >>> numbers_axis(axes[0, 0], 0.1, 2.0)
        >>> numbers_axis(axes[0, 1], 0.9, 1.0)
        >>> axes[0, 0].get_yscale(), axes[0, 1].get_yscale()
        ('log', 'linear')
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not (0 < 2 * low < high):  # no logarithm exists, or the range is so small that it makes no difference
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
    """Save a figure as SVG and PNG.

    Args:
        figure: The figure.
        path: The path of the files; its suffix is replaced.
        endings: The suffixes of the files to write.

    Returns:
        The paths of the files.

    Example:
        >>> from mukron.figures import panels, save
        >>> figure, axes = panels(1, 1)
        >>> [path.name for path in save(figure, "empty")]
        ['empty.svg', 'empty.png']
    """
    written = []
    for ending in endings:
        options: dict[str, Any] = {"metadata": {"Date": None}} if ending == ".svg" else {"dpi": 150}
        target = Path(path).with_suffix(ending)
        figure.savefig(target, bbox_inches="tight", pad_inches=0.05, **options)
        written.append(target)
    return written


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write the numbers of a figure as CSV. Floats have nine digits, which is enough to restore a float32.

    Args:
        path: The path of the file; its suffix is replaced by ``.csv``.
        columns: The heads of the columns.
        rows: The rows.

    Returns:
        The path of the file.

    Example:
        >>> from mukron.figures import write_csv
        >>> path = write_csv("losses", ("width", "loss"), [(64, 0.5), (128, 0.25)])
        >>> print(path.read_text(), end="")
        width,loss
        64,0.5
        128,0.25
    """
    target = Path(path).with_suffix(".csv")
    with target.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows([f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return target
