"""What "stable" means. The numbers were fixed before results were seen."""

from __future__ import annotations

from dataclasses import dataclass

from mukron.bench.stability.runs import StabilityOutcome


@dataclass(frozen=True)
class StabilityRule:
    """When a run counts as stable, beside the run that refreshes at every step with the same learning rate.

    Attributes:
        growth: The largest loss of a batch is at most so many times the initial loss.
        final: The final loss is at most so many times that of refreshing at every step.
        rare: The same for runs that refresh every ``rare_every`` steps or less often.
        rare_every: From this interval on ``rare`` applies.
        floor: Final losses below this count as this: of tiny losses the ratio means nothing.

    Example:
        >>> rule = StabilityRule()
        >>> fresh, stale = StabilityOutcome(2.3, 2.4, 0.2), StabilityOutcome(2.3, 6.9, 0.5)
        >>> rule.violations(1, fresh, fresh), rule.violations(10, stale, fresh)
        ([], ['largest loss 3.00x', 'final loss 2.50x'])
    """

    growth: float = 2.0
    final: float = 1.5
    rare: float = 2.0
    rare_every: int = 50
    floor: float = 0.05

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            f"No batch has more than {self.growth:g} times the loss of the first one, and the final loss (the mean "
            f"over the last tenth of the steps) is at most {self.final:g} times that of refreshing at every step, "
            f"{self.rare:g} times for refreshes every {self.rare_every} steps. Final losses below {self.floor:g} "
            f"count as {self.floor:g}."
        )

    def ratio(self, outcome: StabilityOutcome, fresh: StabilityOutcome) -> float:
        """The final loss over that of refreshing at every step.

        Args:
            outcome: The run.
            fresh: The run that refreshes at every step.
        """
        if outcome == fresh:
            return 1.0
        return max(outcome.final, self.floor) / max(fresh.final, self.floor)

    def violations(self, every: int, outcome: StabilityOutcome, fresh: StabilityOutcome) -> list[str]:
        """What the rule forbids, in words; nothing if the run is stable.

        Args:
            every: Steps from one refresh to the next.
            outcome: The run.
            fresh: The run that refreshes at every step.
        """
        if outcome.failed:
            return [f"error: {outcome.failed}"]
        found = []
        if not outcome.growth <= self.growth:
            found.append(f"largest loss {times_text(outcome.growth)}")
        ratio = self.ratio(outcome, fresh)
        if not ratio <= (self.rare if every >= self.rare_every else self.final):  # inf / inf is refused, too
            found.append(f"final loss {times_text(ratio)}")
        return found

    def stable(self, fresh: StabilityOutcome) -> bool:
        """Whether a run that refreshes at every step obeys the rule.

        Args:
            fresh: The run.
        """
        return not self.violations(1, fresh, fresh)


RULE = StabilityRule()


def times_text(number: float) -> str:
    """Write a ratio: short, and large ones as powers of ten.

    Args:
        number: The ratio.

    Returns:
        The text.

    Example:
        >>> times_text(1.26), times_text(48.0), times_text(8e17), times_text(float("inf"))
        ('1.26x', '48.0x', '8e+17x', 'infx')
    """
    return f"{number:.2f}x" if number < 9.995 else f"{number:.1f}x" if number < 1000 else f"{number:.0e}x"
