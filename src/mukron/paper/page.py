"""The pages of the reproduction, written from the stored results next to them only.

README.md answers whether the paper holds up: the abstract's claims first, then where we disagree, a matrix of claim and
network, and the list of recipes, each of which has a page of its own in its folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from mukron.paper.effects import Effect
from mukron.paper.headlines import ABSTRACT_CLAIMS, CLAIMS_BY_NETWORK, NETWORKS, AcrossNetworks, ClaimName, Headline
from mukron.paper.markdown import command_of, escape_markdown, folder_of, picture, table_lines
from mukron.paper.outcome import Judged, Outcome, outcomes
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, RECIPES, UNTOLD, Finding, Recipe, Scale, verdict_of
from mukron.paper.recipe_page import recipe_page, time_text
from mukron.paper.remarks import DISAGREEMENTS, NOT_RUN
from mukron.paper.settings import WEIGHTS

PAGE_FILE, RULES_FILE, WEIGHTS_FILE = "README.md", "changed-verdicts.md", "initial-weights.md"
VERDICT_PLURALS = {HOLDS: "hold", IN_PART: "hold in part", FAILS: "do not hold", UNTOLD: "cannot be determined"}
SIGMA_ONE_WEIGHTS, TORCHS_WEIGHTS = (
    "zero-transfer",
    "zero-transfer-weights",
)  # the same claims from two kinds of initial weights
REPRODUCTION_HEAD = """\
# Does the paper hold up?

Ishikawa and Karakida, *On the Parameterization of Second-Order Optimization Effective Towards the Infinite Width*
(ICLR 2024, [arXiv 2312.12226](https://arxiv.org/abs/2312.12226)), run again. This page and those it links to are
written by `mukron reproduce` from the results beside them; how claims are judged is said in docs/reproduce.md."""
EFFECT_UNITS = """\
*Points* are of accuracy, with twice the standard error over seeds on either side; *per doubling* is the drift of
the best setting in powers of two for every doubling of the width, *in the exponent* the difference from the exponent
that is claimed, of the layer where it is largest, both with an interval of 95%."""


def write_page(folder: str | os.PathLike[str]) -> Path:
    """Writes the pages of all recipes.

    Args:
        folder: The folder of the recipes' folders; the head page is its README.md.

    Returns:
        The head page.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(folder).name
        'README.md'
    """
    target = Path(folder)
    stored = outcomes(target)
    files = {name: {path.name for path in (target / name).iterdir()} for name in stored}
    for path, text in pages_of(stored, files).items():
        (target / path).write_text(text, encoding="utf-8")
    return target / PAGE_FILE


def pages_of(outcomes: Mapping[str, Outcome], files: Mapping[str, Collection[str]] | None = None) -> dict[str, str]:
    """Returns all pages: the head page, a page a recipe, and what did not fit on them.

    Args:
        outcomes: The outcomes by recipe.
        files: By recipe, the files in its folder; only these are shown or linked to.

    Returns:
        The text of each page by its path.

    Example:
        >>> list(pages_of({}))
        ['README.md']
    """
    files = files or {}
    pages = {PAGE_FILE: page_of(outcomes, files)}
    for path, lines in ((RULES_FILE, _changed_verdicts(outcomes)), (WEIGHTS_FILE, _initial_weights(outcomes))):
        if text := "\n".join(lines):
            pages[path] = f"{text}\n"
    for name, recipe in RECIPES.items():
        if name in outcomes:
            pages[f"{name}/{PAGE_FILE}"] = recipe_page(recipe, outcomes[name], files.get(name, ()))
    return pages


def page_of(outcomes: Mapping[str, Outcome], files: Mapping[str, Collection[str]] | None = None) -> str:
    """Returns the head page as Markdown.

    Args:
        outcomes: The outcomes by recipe.
        files: By recipe, the files in its folder; only these are shown.

    Returns:
        The text of the page.

    Example:
        >>> page_of({}).splitlines()[0]
        '# Does the paper hold up?'
    """
    files = files or {}
    run = {name: recipe for name, recipe in RECIPES.items() if name in outcomes}
    left = {name: recipe for name, recipe in RECIPES.items() if name not in outcomes}
    lines = [REPRODUCTION_HEAD, "", *_headlines(outcomes), _counts(outcomes), "", *_disagreements(outcomes)]
    lines += [*_matrix(outcomes), "## The recipes", ""]
    rows = [_row(recipe, outcomes[name], files.get(name, ())) for name, recipe in run.items()]
    lines += table_lines(("", "Recipe", "Found"), rows)
    if left:
        lines += ["", "### Not run yet", ""]
        lines += table_lines(("Recipe", "Why not", "Command"), map(_row_not_run, left.values()))
    return "\n".join(lines) + "\n"


def find_claim(outcomes: Mapping[str, Outcome], name: ClaimName) -> Judged | None:
    """Returns a claim of a recipe with its verdict.

    Args:
        outcomes: The outcomes by recipe.
        name: The recipe and the claim's text.

    Returns:
        The claim; None if the recipe was not run or, at its scale, does not make it.

    Example:
        >>> find_claim({}, ("nngp", "SGD is almost the same.")) is None
        True
    """
    recipe, claim = name
    claims = outcomes[recipe].claims if recipe in outcomes else ()
    return next((judged for judged in claims if judged.claim == claim), None)


# The claims of the abstract.


def _headlines(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    rows = [row for headline in ABSTRACT_CLAIMS if (row := _headline(outcomes, headline)) is not None]
    if rows:
        yield from table_lines(("The paper's abstract", "Here", "How much", "Caveat"), rows)
        yield from ("", EFFECT_UNITS, "")


def _headline(outcomes: Mapping[str, Outcome], headline: Headline) -> tuple[str, ...] | None:
    answers = [
        (label, judged)
        for question in headline.questions
        for label, name in question.answers.items()
        if (judged := find_claim(outcomes, name)) is not None
    ]
    of_the_paper = [(label, judged) for label, judged in answers if not judged.ours]
    if not of_the_paper:
        return None
    verdict = headline_verdict([judged for _, judged in of_the_paper])
    counted = Counter(judged.verdict for _, judged in of_the_paper)
    counts = ", ".join(f"{counted[each]} {plural}" for each, plural in VERDICT_PLURALS.items() if counted[each])
    caveats = [escape_markdown(headline.caveat)]
    caveats += [f"{escape_markdown(label)} (ours): {_found(judged)}." for label, judged in answers if judged.ours]
    return (
        escape_markdown(headline.claim),
        f"**{escape_markdown(verdict)}**<br>{counts}",
        "<br>".join(_ranges(outcomes, headline)),
        " ".join(caveats),
    )


def headline_verdict(claims: Sequence[Judged]) -> str:
    """Returns the verdict on a claim of the abstract from those on the claims that it comes down to.

    Args:
        claims: The claims with their verdicts.

    Returns:
        The verdict, by the rule for a recipe's claims.

    Example:
        >>> headline_verdict([Judged("a", "", "holds", ""), Judged("b", "", "does not hold", "")])
        'holds in part'
    """
    return verdict_of([Finding(judged.verdict, judged.measured) for judged in claims])


def _ranges(outcomes: Mapping[str, Outcome], headline: Headline) -> Iterator[str]:
    """Yields for each question the lowest and the highest effect, and where they were found."""
    for question in headline.questions:
        found: list[tuple[Effect, str]] = []
        for label, name in question.answers.items():
            judged = find_claim(outcomes, name)
            if judged is not None and judged.effect is not None and not judged.ours:
                place = label.replace(" (", ", ").removesuffix(")")
                found.append((judged.effect, f"{place}: {UNTOLD}" if judged.verdict == UNTOLD else place))
        if not found:
            continue
        found.sort(key=lambda pair: pair[0].value)
        ends = dict.fromkeys((found[0], found[-1]))
        shown = " to ".join(f"{escape_markdown(effect.numbers)} ({escape_markdown(label)})" for effect, label in ends)
        brief = f"{escape_markdown(question.brief)}: " if question.brief else ""
        yield f"{brief}{shown} {found[0][0].unit}".rstrip()


def _found(judged: Judged) -> str:
    effect = "" if judged.effect is None else f", {escape_markdown(str(judged.effect))}"
    return f"{escape_markdown(judged.verdict)}{effect}"


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
    sentence += (
        f" By scale: {by_scale}. {minutes:,.0f} minutes of training, where runs that recipes share count for each."
    )
    changed = sum(bool(judged.earlier) for judged in claims)
    if changed:
        sentence += f" Verdicts that changed because their rule changed: [{changed}]({RULES_FILE})."
    if {SIGMA_ONE_WEIGHTS, TORCHS_WEIGHTS} <= outcomes.keys():
        sentence += f" Verdicts depend on the initial weights: [side by side]({WEIGHTS_FILE})."
    return sentence


def _by_verdict(judged: Sequence[Outcome | Judged]) -> str:
    verdicts = Counter(each.verdict for each in judged)
    return ", ".join(f"{verdicts[verdict]} {plural}" for verdict, plural in VERDICT_PLURALS.items())


# Where we disagree, and the matrix.


def _disagreements(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    entries = []
    for disagreement in DISAGREEMENTS:
        failing = [
            (name, judged)
            for name in disagreement.claims
            if (judged := find_claim(outcomes, name)) is not None and judged.verdict == FAILS
        ]
        if failing:
            where = ", ".join(
                f"[{escape_markdown(RECIPES[recipe].where)}]({folder_of(recipe)}{PAGE_FILE})"
                + ("" if judged.effect is None else f" {escape_markdown(str(judged.effect))}")
                for (recipe, _), judged in failing
            )
            entries.append(f"- **{escape_markdown(disagreement.title)}.** {where}. {escape_markdown(disagreement.why)}")
    if entries:
        yield from ("## Where we disagree, and why", "", *entries, "")


def _matrix(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    rows = [(question, _cells(outcomes, question)) for question in CLAIMS_BY_NETWORK]
    rows = [(question, cells) for question, cells in rows if cells]
    shown = [network for network in NETWORKS if any(network in cells for _, cells in rows)]
    if rows:
        yield from ("## Claims by network", "")
        yield from table_lines(
            ("", *map(escape_markdown, shown)),
            (
                (_title(outcomes, question), *("<br>".join(cells.get(network, ())) for network in shown))
                for question, cells in rows
            ),
        )
        yield ""


def _title(outcomes: Mapping[str, Outcome], question: AcrossNetworks) -> str:
    """Returns a question with the unit of its effects."""
    found = [find_claim(outcomes, name) for name in question.answers.values()]
    units = {judged.effect.unit for judged in found if judged is not None and judged.effect is not None}
    return escape_markdown(", ".join((question.title, *sorted(filter(None, units)))))


def _cells(outcomes: Mapping[str, Outcome], question: AcrossNetworks) -> dict[str, list[str]]:
    """Returns by network the answers to a question; "MLP (Fashion-MNIST)" is another answer of the MLP's."""
    cells: dict[str, list[str]] = {}
    for label, name in question.answers.items():
        judged = find_claim(outcomes, name)
        if judged is None:
            continue
        network, _, note = label.partition(" (")
        verdict = f"[**{escape_markdown(judged.verdict)}**]({folder_of(name[0])}{PAGE_FILE})"
        lines = [f"{escape_markdown(note[:-1])}: {verdict}" if note else verdict]
        lines += ["(ours)"] if judged.ours else []
        lines += [] if judged.effect is None else [escape_markdown(judged.effect.numbers)]
        cells.setdefault(network, []).extend(lines)
    return cells


# The recipes.


def _row(recipe: Recipe, outcome: Outcome, files: Collection[str]) -> tuple[str, ...]:
    folder = folder_of(recipe.name)
    held = sum(judged.verdict == HOLDS for judged in outcome.claims)
    lines = [
        f"**{escape_markdown(outcome.verdict)}**",
        f"{held} of {len(outcome.claims)} claims hold",
        *(
            []
            if outcome.scale == Scale.PAPER.value and not outcome.less
            else [f"scale: {escape_markdown(_size(outcome))}"]
        ),
        *([time_text(outcome.minutes)] if outcome.minutes else []),
    ]
    title = f"**{escape_markdown(recipe.where)}**<br>[{escape_markdown(recipe.title)}]({folder}{PAGE_FILE})"
    return picture(recipe, files, folder, 180), title, "<br>".join(lines)


def _row_not_run(recipe: Recipe) -> tuple[str, ...]:
    title = f"**{escape_markdown(recipe.where)}**<br>{escape_markdown(recipe.title)}"
    return title, escape_markdown(NOT_RUN.get(recipe.name, "Not run yet.")), f"`{command_of(recipe)}`"


def _size(outcome: Outcome) -> str:
    return outcome.scale + (f", reduced: {outcome.less}" if outcome.less else "")


# Pages of their own.


def _changed_verdicts(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yields the claims on which the rule that decides now and the one before it differ."""
    rows = [
        (
            f"[{escape_markdown(recipe.where)}]({folder_of(name)}{PAGE_FILE})",
            escape_markdown(judged.claim),
            escape_markdown(judged.earlier),
            escape_markdown(judged.verdict),
        )
        for name, recipe in RECIPES.items()
        if name in outcomes
        for judged in outcomes[name].claims
        if judged.earlier
    ]
    if rows:
        yield from ("# Verdicts that changed because their rule changed", "")
        yield f"The numbers are the same. Claims judged otherwise: {len(rows)}. The recipes' pages have the reasons."
        yield from ("", *table_lines(("", "Claim", "Earlier rule", "Now"), rows))


def _initial_weights(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yields what the same claims are found to be from two kinds of initial weights."""
    if not {SIGMA_ONE_WEIGHTS, TORCHS_WEIGHTS} <= outcomes.keys():
        return
    others = {judged.claim: judged for judged in outcomes[TORCHS_WEIGHTS].claims}
    rows = [
        (escape_markdown(judged.claim), _measured(judged), _measured(others[judged.claim]))
        for judged in outcomes[SIGMA_ONE_WEIGHTS].claims
        if judged.claim in others
    ]
    yield from ("# What the initial weights decide", "", escape_markdown(WEIGHTS), "")
    yield from table_lines(("Claim", "Variance 1 / fan-in", "Torch's own, a third of it"), rows)


def _measured(judged: Judged) -> str:
    return f"**{escape_markdown(judged.verdict)}**<br>{escape_markdown(judged.measured)}"
