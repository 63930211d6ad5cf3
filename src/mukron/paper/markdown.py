"""Markdown of the reproduction's pages: texts, pictures and commands that are read as they are."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence
from urllib.parse import quote

from mukron.paper.outcome import FIGURE_NAME
from mukron.paper.recipe import Recipe

FIGURE_FILE = f"{FIGURE_NAME}.svg"


def escape_markdown(content: str) -> str:
    """Escapes a text for Markdown and puts it on one line.

    Args:
        content: The text.

    Returns:
        The text with every special character escaped.

    Example:
        >>> escape_markdown("b_L is 1")
        'b\\\\_L is 1'
    """
    line = html.escape(" ".join(content.split()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", line)
    line = re.sub(r"^([-+])(?=\s|$)", r"\\\1", line)  # at the beginning these open a list
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, whose cells are Markdown already.

    Args:
        columns: The heads of the columns.
        rows: The cells.

    Returns:
        The lines.

    Example:
        >>> table_lines(("a", "b"), [("1", "2")])
        ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    return (
        [f"| {' | '.join(cells)} |" for cells in (columns,)]
        + [f"|{'---|' * len(columns)}"]
        + [f"| {' | '.join(cells)} |" for cells in rows]
    )


def picture(recipe: Recipe, files: Collection[str], folder: str = "", width: int | None = None) -> str:
    """Returns a recipe's figure as HTML, empty if there is no file.

    Args:
        recipe: The recipe.
        files: The files in its folder.
        folder: The path from the page to its folder, with a slash at the end; empty on a page in that folder.
        width: The width in pixels; None for the figure's own.

    Returns:
        A link around the picture.
    """
    if FIGURE_FILE not in files:
        return ""
    target = f"{folder}{FIGURE_FILE}"
    size = f' width="{width}"' if width else ""
    alternative = html.escape(f"{recipe.where}: {recipe.title}").replace("|", "&#124;")
    return f'<a href="{target}"><img src="{target}"{size} alt="{alternative}"></a>'


def command_block(command: str) -> list[str]:
    """Returns the lines of a block that holds a command, however many backticks are in it.

    Args:
        command: The command.

    Returns:
        The lines.

    Example:
        >>> command_block("mukron reproduce --list")
        ['```sh', 'mukron reproduce --list', '```']
    """
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", command)), default=0))
    return [f"{fence}sh", command, fence]


def folder_of(name: str) -> str:
    """Returns the path from the head page to a recipe's folder, as links have it.

    Args:
        name: The recipe's name.

    Returns:
        The path, with a slash at the end.

    Example:
        >>> folder_of("nngp")
        'nngp/'
    """
    return f"{quote(name)}/"


def command_of(recipe: Recipe) -> str:
    """Returns the command that runs a recipe at the paper's scale.

    Args:
        recipe: The recipe.

    Returns:
        The command.

    Example:
        >>> from mukron.paper import RECIPES
        >>> command_of(RECIPES["nngp"])
        'mukron reproduce nngp --scale paper --device cuda'
    """
    return f"mukron reproduce {recipe.name} --scale paper --device cuda"
