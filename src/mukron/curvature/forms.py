"""Every decision between rows, a matrix and D^T H, with the costs it rests on, in multiplications.

    N     rows: samples times positions of a batch
    d     size of a factor, "other" that of the layer's other side
    rows  a factor as its N rows; a matrix: d x d
    D^T H a weight's gradient as the product of the batch's signals D [N, d_out] and inputs H [N, d_in]

All are functions of sizes alone, so each is decided once for a layer and a batch size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from mukron.layers import MatrixLayer

if TYPE_CHECKING:
    from mukron.curvature.capture import Capture

ROWS, MATRIX, AUTO = "rows", "matrix", "auto"
FORMS = (AUTO, ROWS, MATRIX)


@lru_cache(maxsize=4096)
def as_rows(rows: int, d: int, other: int, form: str = AUTO) -> bool:
    """Whether a factor is held as its rows, in a step that refreshes it.

    rows:    N^2 d (Gram matrix) + N^3 / 3 (Cholesky) + 2 N d other (apply to a d x other gradient) + N^2 other
    matrix:  N d^2 (form)        + d^3     (inverse)  + d^2 other   (apply)
    """
    if form != AUTO:
        return form == ROWS
    in_sample_space = rows**2 * d + rows**3 / 3 + 2 * rows * d * other + rows**2 * other
    return in_sample_space < rows * d**2 + d**3 + d**2 * other


@lru_cache(maxsize=4096)
def keeps_halves(rows: int, d_in: int, d_out: int, form: str, signals: bool) -> bool:
    """Whether D and H are kept beside the gradient: where a factor is held as rows.

    A factor's rows applied to D and H cost N^2 d instead of the N d_in d_out of the gradient itself. And D^T H keeps
    its digits at small damping, where Woodbury's identity applied to the gradient loses them (``SampleSpace``).
    """
    return as_rows(rows, d_in, d_out, form) or (signals and as_rows(rows, d_out, d_in, form))


@lru_cache(maxsize=4096)
def replaces_gradient(
    rows: int, d_in: int, d_out: int, form: str, fresh: bool, inputs: bool, signals: bool, own_signals: bool
) -> bool:
    """With ``fused=True``: whether a weight's gradient is not formed at all, since D^T H is cheaper to precondition.

    fresh: the factors come from this batch. own_signals: the factor B is made of D itself (the empirical Fisher).

    halves:  A's side  N^2 d_out (its own rows), 2 N^2 d_in (another batch's) or N d_in^2 (a matrix);  B's likewise
    matrix:  A's side  2 N d_in d_out (rows) or d_in^2 d_out (a matrix);  B's likewise
    """
    if not (inputs or signals):  # factors are made of the gradient: all products then cost N d^2 in place of d^3
        return min(d_in, d_out) >= 2 * rows
    a_rows, b_rows = form != MATRIX and d_in > rows, form != MATRIX and d_out > rows
    halves = (rows * d_out if fresh else 2 * rows * d_in) * rows if a_rows else rows * d_in**2
    matrix = 2 * rows * d_in * d_out if a_rows else d_in**2 * d_out
    if signals:
        halves += (1 if own_signals and fresh else 2) * rows**2 * d_out if b_rows else rows * d_out**2
        matrix += 2 * rows * d_in * d_out if b_rows else d_out**2 * d_in
    return halves < matrix


@lru_cache(maxsize=4096)
def rows_wait(rows: int, d_in: int, groups: int, numbers: int) -> bool:
    """Whether rows are made at the step, when the graph is gone: a convolution's patches are larger than its input."""
    return rows * d_in * groups > 2 * numbers


def makes_gradient(capture: Capture, layer: MatrixLayer, x: Tensor) -> bool:
    """Whether the gradient of a layer's weight is to be D^T H, and not formed by autograd."""
    options, N = capture.options, layer.row_count(x)
    sizes = (layer.d_in, layer.d_out, options.form, capture.due)
    return N is not None and replaces_gradient(N, *sizes, options.inputs, options.signals, options.empirical)
