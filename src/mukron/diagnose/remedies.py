"""What to do about a check that is not passed."""

from __future__ import annotations

from collections.abc import Sequence

from mukron.diagnose.readings import ATTENTION, DAMPING, FEATURES, LOGITS, UNCLEAR, UPDATE, Verdict
from mukron.diagnose.record import HEAD, OUTPUT, Record

LARGE_OUTPUT_CHANGE = 3.0  # a change of the output above which the laws of the first steps no longer hold


def remedies(record: Record, failures: Sequence[Verdict], damping: Sequence[Verdict]) -> list[str]:
    """Return suggestions for a check that is not passed."""
    words = {verdict.word for verdict in failures}
    found = []
    if not record.planned:
        found.append("The optimizer does not use the plan: give it plan.param_groups(...), or the plan itself.")
    if UNCLEAR in words:
        found.append("Unclear ones need more seeds, or wider networks: narrow ones deviate from the law.")
    found += _attention(record, failures) + _tied(record, failures)
    vanishing = {verdict.layer.rpartition(".")[0] for verdict in failures if verdict.word == UPDATE.low}
    overdamped = [
        verdict.layer
        for verdict in damping
        if verdict.word == DAMPING.high and verdict.layer.rpartition(".")[0] in vanishing
    ]
    if overdamped:
        found.append(
            f"Damping outgrows its factor in {', '.join(overdamped)}: muP needs a rule that keeps pace (rescaled)."
        )
    exploding = {verdict.layer.rpartition(".")[0] for verdict in failures if verdict.word == UPDATE.high}
    damped_B = [
        verdict.layer
        for verdict in damping
        if verdict.word == DAMPING.high and verdict.layer.endswith(".B") and verdict.layer[:-2] in exploding
    ]
    if damped_B and record.scheme == "mup":
        found.append(
            f"B is outgrown by its damping in {len(damped_B)} layers: with more rows (samples x positions) than "
            "channels these widths are too narrow for the law. Compare wider networks, or fewer samples."
        )
    if record.scheme != "mup" and words & {FEATURES.low, FEATURES.high}:
        found.append(f"The scheme is {record.scheme}; mup is the one that keeps all layers learning.")
    change = max((row.value for row in record.select(FEATURES.quantity, OUTPUT)), default=0.0)
    too_far = [reason for reason in record.broken.values() if "after 0 steps" not in reason]
    if too_far or change > LARGE_OUTPUT_CHANGE:
        reason = f" (the output moved by {change:.3g})" if change > LARGE_OUTPUT_CHANGE else ""
        found.append(f"A lower learning rate keeps steps small enough for the law{reason}.")
    return found


def _attention(record: Record, failures: Sequence[Verdict]) -> list[str]:
    """Name attention logits that grow, with the cause where it was seen: the size of the heads."""
    found = []
    if wrong := [verdict.layer for verdict in failures if verdict.word == LOGITS.high]:
        sizes = {row.width: row.value for row in record.select("head_dim", wrong[0])}
        found.append(
            f"Attention logits grow with the width in {_some(wrong)}: the size d of a head grows from "
            f"{sizes[record.widths[0]]:g} to {sizes[record.widths[-1]]:g}, and muP needs logits that are divided by d, "
            "not by its root."
        )
    growing = [verdict for verdict in failures if (verdict.reading, verdict.word) == (ATTENTION.title, ATTENTION.high)]
    if others := [verdict.layer for verdict in growing if verdict.layer not in wrong]:
        found.append(f"Attention logits grow with the width in {_some(others)}.")
    return found


def _tied(record: Record, failures: Sequence[Verdict]) -> list[str]:
    """Name a tied head if the network's output grows: its logits are sums over the width of weights that stay large."""
    grows = any(verdict.layer == OUTPUT and verdict.word == FEATURES.high for verdict in failures)
    tied = [f"{alias} is tied to {name}" for alias, name in record.tied.items()]
    tied += [f"The output is a product with {name}, an embedding's weight" for name in record.layers(HEAD)]
    if not grows or not tied:
        return []
    return [
        f"{tied[0]}: an embedding's entries do not shrink as the width grows, so the logits need a multiplier, base "
        "width / width, in the network's forward."
    ]


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
