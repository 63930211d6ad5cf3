"""How results show themselves: in a few lines of text, and in notebooks as HTML with a table and a figure.

The HTML needs no other file, takes the colours of the page that it is on, and escapes every text.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING

from mukron.figures import available, styled
from mukron.table import PAGE_WIDTH, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI = 90


class Shown:
    """A result that prints as a few lines and shows as HTML. Classes say which lines, tables and figure.

    Example:
        >>> class Count(Shown):
        ...     def _summary(self):
        ...         return ["Count of things", "3 of them"]
        >>> Count()
        Count of things
        3 of them
    """

    def _summary(self) -> list[str]:
        """The lines that are printed; the first one is the title."""
        raise NotImplementedError

    def _tables(self) -> list[Table]:
        """The tables for notebooks."""
        return []

    def _figure(self) -> Figure | None:
        """That of ``plot``, where matplotlib is installed; None or a ValueError where there is nothing to draw."""
        plot = getattr(self, "plot", None)
        return None if plot is None else plot()

    def __repr__(self) -> str:
        return "\n".join(fill(line, PAGE_WIDTH, break_long_words=False) for line in self._summary())

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The result for notebooks."""
        title, *lines = self._summary()
        parts = [f'<div style="margin: 0.4em 0"><b>{escape(title)}</b></div>']
        parts += [f'<div style="max-width: 60em">{escape(line)}</div>' for line in lines]
        parts += [table._repr_html_() for table in self._tables()]
        try:
            drawn = self._figure() if available() else None
        except ValueError:
            drawn = None
        parts += [] if drawn is None else [picture(drawn, title)]
        return f'<div style="color: inherit">\n{chr(10).join(parts)}\n</div>'


@styled
def picture(figure: Figure, title: str) -> str:
    """Return a figure as an HTML image that holds its own data, on white, which is readable on dark pages too.

    Args:
        figure: The figure.
        title: What the image shows, for readers who do not see it.

    Example:
        >>> from mukron.figures import panels
        >>> picture(panels(1, 1)[0], "<nothing>").partition(" src=")[0]
        '<img alt="&lt;nothing&gt;"'
    """
    file = BytesIO()
    figure.savefig(file, format="png", dpi=FIGURE_DPI, facecolor="white")
    data = b64encode(file.getvalue()).decode("ascii")
    style = "max-width: 100%; background: white; margin-top: 0.6em"
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}" style="{style}">'
