"""The page of one recipe, README.md in its folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from urllib.parse import quote

from mukron.paper.markdown import FIGURE_FILE, command_block, command_of, escape_markdown, picture
from mukron.paper.outcome import EVIDENCE_FILE, NUMBERS_NAME, RESULT_FILE, Judged, Outcome
from mukron.paper.recipe import FAILS, Recipe, Scale

NUMBERS_FILE = f"{NUMBERS_NAME}.csv"
SCALE_DESCRIPTIONS = {
    Scale.SMOKE.value: "smoke, which shows that the recipe runs and nothing else",
    Scale.SMALL.value: "small, with narrower networks and shorter grids than the paper's",
    Scale.PAPER.value: "the paper's own",
}
PAPERS_SIZE = {Scale.PAPER.value: "smaller than the paper's"}  # by scale, what a reduced one is


def recipe_page(recipe: Recipe, outcome: Outcome, files: Collection[str]) -> str:
    """Returns the page of a recipe that was run, as Markdown.

    Args:
        recipe: The recipe.
        outcome: Its outcome.
        files: The files in its folder; only these are shown or linked to.

    Returns:
        The text of the page.

    Example:
        >>> from mukron.paper import RECIPES, Outcome
        >>> outcome = Outcome("nngp", "small", "", "holds", (), (), {})
        >>> recipe_page(RECIPES["nngp"], outcome, ()).splitlines()[0]
        '# Figure 3: K-FAC converges to the NNGP solution when the last layer starts near zero'
    """
    return "\n".join(_lines(recipe, outcome, files)) + "\n"


def _lines(recipe: Recipe, outcome: Outcome, files: Collection[str]) -> Iterator[str]:
    yield f"# {escape_markdown(recipe.where)}: {escape_markdown(recipe.title)}"
    yield ""
    if figure := picture(recipe, files):
        yield from (figure, "")
    size = SCALE_DESCRIPTIONS.get(outcome.scale, outcome.scale)
    size = escape_markdown(PAPERS_SIZE.get(outcome.scale, size) if outcome.less else size)
    reduced = f"; reduced: {escape_markdown(outcome.less)}." if outcome.less else "."
    yield f"Found: **{escape_markdown(outcome.verdict)}**. Scale: {size}{reduced}"
    yield ""
    for number, judged in enumerate(outcome.claims, 1):
        yield from _claim(number, judged)
    if outcome.choices:
        where = "" if outcome.scale == Scale.PAPER.value and not outcome.less else " for the paper's own scale"
        yield ""
        yield f"What the paper leaves open, or says in two ways, what was chosen{where}, and how it was run:"
        yield ""
        yield from (f"- {escape_markdown(choice)}" for choice in outcome.choices)
    yield from ("", "Made with", "", *command_block(outcome.made.get("command") or command_of(recipe)))
    about = [
        f"{escape_markdown(key)}: {escape_markdown(value)}"
        for key, value in outcome.made.items()
        if key != "command" and value
    ]
    if about and not outcome.made.get("commit"):
        about.append("commit: not recorded")
    if outcome.minutes:
        about.append(f"{time_text(outcome.minutes)} of training")
    if about:
        yield from ("", "; ".join(about) + ".")
    if links := [name for name in (FIGURE_FILE, NUMBERS_FILE, EVIDENCE_FILE, RESULT_FILE) if name in files]:
        yield from ("", "All of it: " + ", ".join(f"[{name}]({quote(name)})" for name in links) + ".")
    yield from ("", "[All recipes](../README.md)")


def time_text(minutes: float) -> str:
    """Returns minutes in words: in seconds below one.

    Args:
        minutes: The minutes.

    Returns:
        The text.

    Example:
        >>> time_text(57.6), time_text(0.3)
        ('58 minutes', '18 seconds')
    """
    amount, unit = (minutes, "minute") if minutes >= 1 else (60 * minutes, "second")
    return f"{amount:.0f} {unit}{'' if round(amount) == 1 else 's'}"


def _claim(number: int, judged: Judged) -> Iterator[str]:
    ours = " (Ours.)" if judged.ours else ""
    yield f"{number}. {escape_markdown(judged.claim)}{ours} **{escape_markdown(judged.verdict)}**"
    indent = " " * (len(str(number)) + 2)
    if judged.paper:
        yield f"{indent}- The paper: {escape_markdown(judged.paper)}"
    yield f"{indent}- Here: {escape_markdown(judged.measured) or '-'}"
    if judged.effect is not None:
        yield f"{indent}- Effect: {escape_markdown(str(judged.effect))}"
    if judged.earlier:
        yield f"{indent}- By the earlier rule: **{escape_markdown(judged.earlier)}**. {escape_markdown(judged.rule)}"
    if judged.tried or judged.verdict == FAILS:
        yield f"{indent}- Tried: {escape_markdown(judged.tried) or 'nothing else yet.'}"
