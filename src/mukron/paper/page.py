"""The page of all recipes, README.md: written from the results that are kept beside it, and from nothing else."""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from urllib.parse import quote

from mukron.paper.outcome import EVIDENCE_FILE, FIGURE, NUMBERS, RESULT_FILE, Judged, Outcome, outcomes
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, RECIPES, UNTOLD, Recipe, Scale

PAGE, PICTURE, TABLE = "README.md", f"{FIGURE}.svg", f"{NUMBERS}.csv"
NOT_RUN = "not run yet"
MANY = {HOLDS: "hold", IN_PART: "hold in part", FAILS: "do not hold", UNTOLD: "cannot be told"}
SCALES = {
    Scale.SMOKE.value: "smoke, which shows that the recipe runs and nothing else",
    Scale.SMALL.value: "small, with narrower networks and shorter grids than the paper's",
    Scale.PAPER.value: "the paper's own",
}
SHORT, FEW = 140, 3  # letters of a claim and claims of a recipe, in the table
HEAD = """\
# The paper, recipe by recipe

Each figure and table of Ishikawa and Karakida, *On the Parameterization of Second-Order Optimization Effective Towards
the Infinite Width* (ICLR 2024, [arXiv 2312.12226](https://arxiv.org/abs/2312.12226)): what the paper claims of it, what
was found here, and how to run it again. This page is written by `mukron reproduce` from the results beside it."""


def write_page(folder: str | os.PathLike[str]) -> Path:
    """FOLDER/README.md, from the outcomes that are kept in the folder."""
    target = Path(folder)
    kept = outcomes(target)
    files = {name: {path.name for path in (target / name).iterdir()} for name in kept}
    page = target / PAGE
    page.write_text(page_of(kept, files), encoding="utf-8")
    return page


def page_of(outcomes: Mapping[str, Outcome], files: Mapping[str, Collection[str]] | None = None) -> str:
    """The page as Markdown. files: those in each recipe's folder; none but these is shown or linked to."""
    files = files or {}
    lines = [HEAD, "", _counts(outcomes), "", "| | Recipe | The paper's claims | Found |", "|---|---|---|---|"]
    lines += [_row(recipe, outcomes.get(name), files.get(name, ())) for name, recipe in RECIPES.items()]
    for name, recipe in RECIPES.items():
        if name in outcomes:
            lines += ["", *_section(recipe, outcomes[name], files.get(name, ()))]
    return "\n".join(lines) + "\n"


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    shown = [outcomes[name] for name in RECIPES if name in outcomes]
    verdicts, scales = (Counter(getattr(each, what) for each in shown) for what in ("verdict", "scale"))
    said = f"**{len(shown)} of {len(RECIPES)} recipes were run.**"
    if shown:
        found = ", ".join(f"{verdicts[verdict]} {words}" for verdict, words in MANY.items())
        sizes = ", ".join(f"{scales[scale.value]} {scale.value}" for scale in Scale if scales[scale.value])
        claims = Counter(judged.verdict for each in shown for judged in each.claims)
        counted = ", ".join(f"{claims[verdict]} {words}" for verdict, words in MANY.items())
        said += f" Of these {found}. Of their {sum(claims.values())} claims {counted}. By scale: {sizes}."
    return said


# The table.


def _row(recipe: Recipe, outcome: Outcome | None, files: Collection[str]) -> str:
    name = f"**{text(recipe.where)}**<br>"
    if outcome is None:
        return f"| | {name}{text(recipe.title)} | | {NOT_RUN}:<br>`{_command(recipe)}` |"
    claims = [text(shorten(each.claim, SHORT, placeholder=" ...")) for each in outcome.claims[:FEW]]
    if len(outcome.claims) > FEW:
        claims.append(f"and {len(outcome.claims) - FEW} more")
    held = sum(each.verdict == HOLDS for each in outcome.claims)
    found = [
        f"**{text(outcome.verdict)}**",
        f"{held} of {len(outcome.claims)} claims hold",
        f"scale: {text(_size(outcome))}",
    ]
    title = f"{name}[{text(recipe.title)}](#{_anchor(recipe)})"
    return f"| {_picture(recipe, files, 180)} | {title} | {'<br>'.join(claims)} | {'<br>'.join(found)} |"


def _picture(recipe: Recipe, files: Collection[str], width: int | None = None) -> str:
    """None where there is no file."""
    if PICTURE not in files:
        return ""
    place = f"{quote(recipe.name)}/{PICTURE}"
    size = f' width="{width}"' if width else ""
    words = html.escape(f"{recipe.where}: {recipe.title}").replace("|", "&#124;")
    return f'<a href="{place}"><img src="{place}"{size} alt="{words}"></a>'


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
    yield f"## {text(recipe.where)}: {text(recipe.title)}"
    yield ""
    if picture := _picture(recipe, files):
        yield from (picture, "")
    yield f"Found: **{text(outcome.verdict)}**. Scale: {text(SCALES.get(outcome.scale, outcome.scale))}" + (
        f"; reduced: {text(outcome.less)}." if outcome.less else "."
    )
    yield ""
    for number, judged in enumerate(outcome.claims, 1):
        yield from _claim(number, judged)
    if outcome.choices:
        where = "" if outcome.scale == Scale.PAPER.value and not outcome.less else " for the paper's own scale"
        yield from ("", f"What the paper leaves open, or says in two ways, and what was chosen{where}:", "")
        yield from (f"- {text(choice)}" for choice in outcome.choices)
    yield from ("", "Made with", "", *_block(outcome.made.get("command") or _command(recipe)))
    about = [f"{text(key)}: {text(value)}" for key, value in outcome.made.items() if key != "command" and value]
    if about:
        yield from ("", "; ".join(about) + ".")
    if links := [each for each in (TABLE, EVIDENCE_FILE, RESULT_FILE) if each in files]:
        yield from ("", "All of it: " + ", ".join(f"[{each}]({quote(recipe.name)}/{each})" for each in links) + ".")


def _claim(number: int, judged: Judged) -> Iterator[str]:
    yield f"{number}. {text(judged.claim)} **{text(judged.verdict)}**"
    indent = " " * (len(str(number)) + 2)
    if judged.paper:
        yield f"{indent}- The paper: {text(judged.paper)}"
    yield f"{indent}- Here: {text(judged.measured) or '-'}"
    if judged.tried or judged.verdict == FAILS:
        yield f"{indent}- Tried: {text(judged.tried) or 'nothing else yet.'}"


def _block(command: str) -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", command)), default=0))
    return [f"{fence}sh", command, fence]


def text(words: str) -> str:
    """Words that mean nothing to Markdown: one line, every sign as it is."""
    line = html.escape(" ".join(words.split()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", line)
    line = re.sub(r"^([-+])(?=\s|$)", r"\\\1", line)  # at the beginning these open a list
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)
