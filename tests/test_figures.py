"""One style for all figures, and nothing left behind."""

from __future__ import annotations

import itertools

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb

from mukron.figures import (
    COLOURS,
    line,
    numbers_axis,
    panels,
    powers_axis,
    save,
    shade,
    sizes_axis,
    styled,
    widths_axis,
    write_csv,
)


@styled
def draw():
    figure, axes = panels(1, 2)
    axes[0, 0].plot([1, 2], [1.0, 1.01], **line(0))
    widths_axis(axes[0, 0], [64, 128, 256])
    sizes_axis(axes[0, 0])
    return figure, axes


def test_the_users_settings_stay():
    before = dict(mpl.rcParams)
    axes = draw()[1]
    assert dict(mpl.rcParams) == before
    assert axes.shape == (1, 2)
    assert not axes[0, 0].spines["top"].get_visible()


def test_the_same_numbers_give_the_same_file(tmp_path):
    written = [save(draw()[0], tmp_path / name) for name in ("one", "two")]
    assert [path.name for path in written[0]] == ["one.svg", "one.png"]
    assert written[0][0].read_bytes() == written[1][0].read_bytes()


def test_flat_lines_look_flat():
    low, high = draw()[1][0, 0].get_ylim()
    assert high / low > 99
    assert [label.get_text() for label in draw()[1][0, 0].get_xticklabels()] == ["64", "128", "256"]


def test_settings_are_powers_of_two():
    axes = panels(1, 1)[1][0, 0]
    axes.plot([2**-6, 2**-1], [2**3, 2**7])
    for which in "xy":
        powers_axis(axes, which)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    ticks = [tick for tick in axes.get_xticks() if 2**-6 <= tick <= 2**-1]
    assert ticks == [2**power for power in range(-6, 0)]
    assert axes.xaxis.get_major_formatter()(2**-3) == r"$\mathdefault{2^{-3}}$"


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [(0.21, 0.45, "log"), (0.03, 2.5, "log"), (1e-6, 1.0, "log"), (0.3, 0.31, "linear"), (0.0, 1.0, "linear")],
)
def test_numbers_of_any_range_have_ticks_in_plain_numbers(low, high, scale):
    figure, axes = panels(1, 1)
    numbers_axis(axes[0, 0], low, high)
    figure.canvas.draw()
    bottom, top = axes[0, 0].get_ylim()
    assert bottom < low < high < top
    assert axes[0, 0].get_yscale() == scale
    shown = [each.get_text() for each in axes[0, 0].get_yticklabels() if bottom < each.get_position()[1] < top]
    assert len(shown) >= 2
    assert all(float(text) > -1 for text in shown)  # no powers, no formulas


def test_colours_differ_in_lightness_or_hue_and_lines_never_repeat():
    """For eyes that see no red or no green: any two colours differ in blue or in luminance."""

    def seen(colour: str) -> tuple[float, float]:
        red, green, blue = to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue, blue

    for one, other in itertools.combinations(COLOURS, 2):
        assert max(abs(a - b) for a, b in zip(seen(one), seen(other), strict=True)) > 0.1, (one, other)
    styles = [tuple(line(number).values()) for number in range(20)]
    assert len(set(styles)) == 20
    assert len({shade(number, 6) for number in range(6)}) == 6


def test_numbers_beside_a_figure(tmp_path):
    path = write_csv(tmp_path / "numbers", ("name", "value"), [("a,b", 1 / 3), ("c", 2)])
    assert path.read_text() == 'name,value\n"a,b",0.333333333\nc,2\n'
