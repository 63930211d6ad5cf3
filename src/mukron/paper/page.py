"""The page of all recipes, README.md, written from the stored results next to it only."""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from urllib.parse import quote

from mukron.paper.outcome import EVIDENCE_FILE, FIGURE_NAME, NUMBERS_NAME, RESULT_FILE, Judged, Outcome, outcomes
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, RECIPES, UNTOLD, Recipe, Scale
from mukron.paper.settings import WEIGHTS

PAGE_FILE, FIGURE_FILE, NUMBERS_FILE = "README.md", f"{FIGURE_NAME}.svg", f"{NUMBERS_NAME}.csv"
NOT_RUN = "not run yet"
VERDICT_PLURALS = {HOLDS: "hold", IN_PART: "hold in part", FAILS: "do not hold", UNTOLD: "cannot be determined"}
SCALE_DESCRIPTIONS = {
    Scale.SMOKE.value: "smoke, which shows that the recipe runs and nothing else",
    Scale.SMALL.value: "small, with narrower networks and shorter grids than the paper's",
    Scale.PAPER.value: "the paper's own",
}
PAPERS_SIZE = {Scale.PAPER.value: "smaller than the paper's"}  # by scale, what a reduced one is
SIGMA_ONE_WEIGHTS, TORCHS_WEIGHTS = (
    "zero-transfer",
    "zero-transfer-weights",
)  # the same claims from two kinds of initial weights
CLAIM_LETTERS, CLAIMS_SHOWN = 140, 3  # limits in the table: letters per claim, claims per recipe
REPRODUCTION_HEAD = """\
# The paper, recipe by recipe

Each figure and table of Ishikawa and Karakida, *On the Parameterization of Second-Order Optimization Effective Towards
the Infinite Width* (ICLR 2024, [arXiv 2312.12226](https://arxiv.org/abs/2312.12226)): what the paper claims of it, what
was found here, and how to run it again. This page is written by `mukron reproduce` from the results beside it."""


def write_page(folder: str | os.PathLike[str]) -> Path:
    """Writes the page of all recipes.

    Args:
        folder: The folder of the recipes' folders; the page is its README.md.

    Returns:
        The page.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(folder).name
        'README.md'
    """
    target = Path(folder)
    stored = outcomes(target)
    files = {name: {path.name for path in (target / name).iterdir()} for name in stored}
    page = target / PAGE_FILE
    page.write_text(page_of(stored, files), encoding="utf-8")
    return page


def page_of(outcomes: Mapping[str, Outcome], files: Mapping[str, Collection[str]] | None = None) -> str:
    """Returns the page of all recipes as Markdown.

    Args:
        outcomes: The outcomes by recipe.
        files: By recipe, the files in its folder; only these are shown or linked to.

    Returns:
        The text of the page.

    Example:
        >>> page_of({}).splitlines()[0]
        '# The paper, recipe by recipe'
    """
    files = files or {}
    lines = [
        REPRODUCTION_HEAD,
        "",
        _counts(outcomes),
        "",
        *_changed_verdicts(outcomes),
        *_initial_weights(outcomes),
        "## The recipes",
        "",
        "| | Recipe | The paper's claims | Found |",
        "|---|---|---|---|",
    ]
    lines += [_row(recipe, outcomes.get(name), files.get(name, ())) for name, recipe in RECIPES.items()]
    for name, recipe in RECIPES.items():
        if name in outcomes:
            lines += ["", *_section(recipe, outcomes[name], files.get(name, ()))]
    return "\n".join(lines) + "\n"


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    shown = [outcomes[name] for name in RECIPES if name in outcomes]
    sentence = f"**{len(shown)} of {len(RECIPES)} recipes were run.**"
    if not shown:
        return sentence
    claims = [judged for outcome in shown for judged in outcome.claims]
    sentence += f" Of these {_by_verdict(shown)}."
    for whose, mine in (("of the paper", False), ("of our own", True)):
        counted = [judged for judged in claims if judged.ours == mine]
        if counted:
            sentence += f" Of {len(counted)} claims {whose} {_by_verdict(counted)}."
    sizes = Counter(f"{outcome.scale}{', reduced' if outcome.less else ''}" for outcome in shown)
    by_scale = "; ".join(f"{count} {size}" for size, count in sizes.items())
    minutes = sum(outcome.minutes for outcome in shown)
    return (
        f"{sentence} By scale: {by_scale}. {minutes:,.0f} minutes of training, where runs that recipes share count for "
        "each."
    )


def _by_verdict(judged: Sequence[Outcome | Judged]) -> str:
    verdicts = Counter(each.verdict for each in judged)
    return ", ".join(f"{verdicts[verdict]} {plural}" for verdict, plural in VERDICT_PLURALS.items())


def _changed_verdicts(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yields the claims on which the rule that decides now and the one before it differ."""
    rows = [
        f"| [{escape_markdown(recipe.where)}](#{_anchor(recipe)}) | {escape_markdown(judged.claim)} | "
        f"{escape_markdown(judged.earlier)} | {escape_markdown(judged.verdict)} |"
        for name, recipe in RECIPES.items()
        if name in outcomes
        for judged in outcomes[name].claims
        if judged.earlier
    ]
    if rows:
        yield from ("## Verdicts that changed because their rule changed", "")
        yield f"The numbers are the same. Claims judged otherwise: {len(rows)}. Each section below has the reason."
        yield from ("", "| | Claim | Earlier rule | Now |", "|---|---|---|---|", *rows, "")


def _initial_weights(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yields what the same claims are found to be from two kinds of initial weights."""
    if not {SIGMA_ONE_WEIGHTS, TORCHS_WEIGHTS} <= outcomes.keys():
        return
    others = {judged.claim: judged for judged in outcomes[TORCHS_WEIGHTS].claims}
    rows = [
        f"| {escape_markdown(judged.claim)} | {_found(judged)} | {_found(others[judged.claim])} |"
        for judged in outcomes[SIGMA_ONE_WEIGHTS].claims
        if judged.claim in others
    ]
    yield from ("## What the initial weights decide", "", escape_markdown(WEIGHTS), "")
    yield from ("| Claim | Variance 1 / fan-in | Torch's own, a third of it |", "|---|---|---|", *rows, "")


def _found(judged: Judged) -> str:
    return f"**{escape_markdown(judged.verdict)}**<br>{escape_markdown(judged.measured)}"


# The table.


def _row(recipe: Recipe, outcome: Outcome | None, files: Collection[str]) -> str:
    name = f"**{escape_markdown(recipe.where)}**<br>"
    if outcome is None:
        return f"| | {name}{escape_markdown(recipe.title)} | | {NOT_RUN}:<br>`{_command(recipe)}` |"
    claims = [
        escape_markdown(shorten(judged.claim, CLAIM_LETTERS, placeholder=" ..."))
        for judged in outcome.claims[:CLAIMS_SHOWN]
    ]
    if len(outcome.claims) > CLAIMS_SHOWN:
        claims.append(f"and {len(outcome.claims) - CLAIMS_SHOWN} more")
    held = sum(judged.verdict == HOLDS for judged in outcome.claims)
    lines = [
        f"**{escape_markdown(outcome.verdict)}**",
        f"{held} of {len(outcome.claims)} claims hold",
        f"scale: {escape_markdown(_size(outcome))}",
        *([f"{outcome.minutes:,.0f} minutes"] if outcome.minutes else []),
    ]
    title = f"{name}[{escape_markdown(recipe.title)}](#{_anchor(recipe)})"
    return f"| {_picture(recipe, files, 180)} | {title} | {'<br>'.join(claims)} | {'<br>'.join(lines)} |"


def _picture(recipe: Recipe, files: Collection[str], width: int | None = None) -> str:
    """Returns the figure as HTML, empty if there is no file."""
    if FIGURE_FILE not in files:
        return ""
    target = f"{quote(recipe.name)}/{FIGURE_FILE}"
    size = f' width="{width}"' if width else ""
    alternative = html.escape(f"{recipe.where}: {recipe.title}").replace("|", "&#124;")
    return f'<a href="{target}"><img src="{target}"{size} alt="{alternative}"></a>'


def _size(outcome: Outcome) -> str:
    return outcome.scale + (f", reduced: {outcome.less}" if outcome.less else "")


def _command(recipe: Recipe) -> str:
    return f"mukron reproduce {recipe.name} --scale paper --device cuda"


def _anchor(recipe: Recipe) -> str:
    return quote(recipe.name)


# The sections.


def _section(recipe: Recipe, outcome: Outcome, files: Collection[str]) -> Iterator[str]:
    yield f'<a id="{_anchor(recipe)}"></a>'
    yield ""
    yield f"## {escape_markdown(recipe.where)}: {escape_markdown(recipe.title)}"
    yield ""
    if picture := _picture(recipe, files):
        yield from (picture, "")
    size = SCALE_DESCRIPTIONS.get(outcome.scale, outcome.scale)
    size = escape_markdown(PAPERS_SIZE.get(outcome.scale, size) if outcome.less else size)
    reduced = f"; reduced: {escape_markdown(outcome.less)}." if outcome.less else "."
    yield f"Found: **{escape_markdown(outcome.verdict)}**. Scale: {size}{reduced}"
    yield ""
    for number, judged in enumerate(outcome.claims, 1):
        yield from _claim(number, judged)
    if outcome.choices:
        where = "" if outcome.scale == Scale.PAPER.value and not outcome.less else " for the paper's own scale"
        yield from (
            "",
            f"What the paper leaves open, or says in two ways, what was chosen{where}, and how it was run:",
            "",
        )
        yield from (f"- {escape_markdown(choice)}" for choice in outcome.choices)
    yield from ("", "Made with", "", *_block(outcome.made.get("command") or _command(recipe)))
    about = [
        f"{escape_markdown(key)}: {escape_markdown(value)}"
        for key, value in outcome.made.items()
        if key != "command" and value
    ]
    if about and not outcome.made.get("commit"):
        about.append("commit: not recorded")
    if about:
        yield from ("", "; ".join(about) + ".")
    if links := [name for name in (NUMBERS_FILE, EVIDENCE_FILE, RESULT_FILE) if name in files]:
        yield from ("", "All of it: " + ", ".join(f"[{name}]({quote(recipe.name)}/{name})" for name in links) + ".")


def _claim(number: int, judged: Judged) -> Iterator[str]:
    ours = " (Ours.)" if judged.ours else ""
    yield f"{number}. {escape_markdown(judged.claim)}{ours} **{escape_markdown(judged.verdict)}**"
    indent = " " * (len(str(number)) + 2)
    if judged.paper:
        yield f"{indent}- The paper: {escape_markdown(judged.paper)}"
    yield f"{indent}- Here: {escape_markdown(judged.measured) or '-'}"
    if judged.earlier:
        yield f"{indent}- By the earlier rule: **{escape_markdown(judged.earlier)}**. {escape_markdown(judged.rule)}"
    if judged.tried or judged.verdict == FAILS:
        yield f"{indent}- Tried: {escape_markdown(judged.tried) or 'nothing else yet.'}"


def _block(command: str) -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", command)), default=0))
    return [f"{fence}sh", command, fence]


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
