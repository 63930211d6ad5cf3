"""Where the best learning rate or damping lies at every width or depth; the verdict on it, fixed before results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log2

# Between the best values of two sizes, for a verdict of transfer. Losses hardly depend on damping near its best.
LARGEST_FACTORS = {"lr": 1.5, "damping": 4.0}


@dataclass(frozen=True)
class GPTTransfer:
    """Where the best learning rate, or damping, of a method lies at every width, or at every depth.

    Attributes:
        method: The method's title.
        curves: By size, mean losses by learning rate or damping, in rising order.
        axis: What the sizes are: "width" or "depth".
        seeds: Size, learning rate or damping, and loss of every run.
        setting: What is tuned: "lr" or "damping".
        steps: The number of steps of the runs.

    Example:
        >>> falling = {0.05: 2.0, 0.1: 1.8, 0.2: 2.0}
        >>> GPTTransfer("K-FAC", {128: falling, 256: {0.05: 1.9, 0.1: 1.7, 0.2: 1.9}}).verdict
        'transfers, factor 1.00'
    """

    method: str
    curves: Mapping[int, Mapping[float, float]]
    axis: str = "width"
    seeds: tuple[tuple[int, float, float], ...] = ()
    setting: str = "lr"
    steps: int = 0

    def best(self, size: int) -> float:
        """The best value of a size; on the edge of the grid, that edge.

        Args:
            size: The width or depth.
        """
        return lowest_of_parabola(self.curves[size])

    def at_smallest(self, size: int) -> float:
        """The loss at the value that is best at the smallest size, of those that were tried.

        Args:
            size: The width or depth.
        """
        smallest = self.curves[min(self.curves)]
        return self.curves[size].get(min(smallest, key=lambda lr: smallest[lr]), inf)

    @property
    def on_edge(self) -> list[int]:
        """Sizes whose lowest loss lies on the edge of the grid."""
        lowest = {size: min(curve, key=lambda lr: curve[lr]) for size, curve in self.curves.items()}
        return [size for size, lr in lowest.items() if lr in (min(self.curves[size]), max(self.curves[size]))]

    @property
    def verdict(self) -> str:
        """The verdict, and the factor between the best values."""
        rates = [self.best(size) for size in self.curves]
        factor = max(rates) / min(rates)
        smallest = self.at_smallest(min(self.curves))
        worse = [size for size in self.curves if not self.at_smallest(size) <= smallest]
        if self.on_edge:
            return f"open: best at the edge of the grid at {self.axis} {', '.join(map(str, self.on_edge))}"
        if factor > LARGEST_FACTORS[self.setting]:
            return f"does not transfer, factor {factor:.2f}"
        if worse:
            return f"does not transfer: worse at {self.axis} {', '.join(map(str, worse))}"
        return f"transfers, factor {factor:.2f}"


def lowest_of_parabola(curve: Mapping[float, float]) -> float:
    """Return where the parabola through the lowest point and its neighbours is lowest, over the logarithm.

    Args:
        curve: Losses by learning rate.

    Returns:
        The learning rate; on the edge, or with a neighbour that diverged, the lowest point itself.

    Example:
        >>> round(lowest_of_parabola({0.05: 2.0, 0.1: 1.8, 0.2: 2.0}), 3)
        0.1
    """
    rates = sorted(curve)
    place = min(range(len(rates)), key=lambda k: curve[rates[k]])
    if place in (0, len(rates) - 1):
        return rates[place]
    low, mid, high = rates[place - 1 : place + 2]
    a, b, c = curve[low], curve[mid], curve[high]
    if not (isfinite(a) and isfinite(c)):
        return mid
    left, right = log2(low / mid), log2(high / mid)
    slope, curvature = _parabola(left, a - b, right, c - b)
    return float(mid * 2 ** (-slope / (2 * curvature))) if curvature > 0 else mid


def _parabola(x: float, y: float, u: float, v: float) -> tuple[float, float]:
    """The slope and the curvature of s t + k t^2 through (0, 0), (x, y) and (u, v)."""
    k = (y / x - v / u) / (x - u)
    return y / x - k * x, k
