"""The figures and the HTML page of a study. They need only its stored record."""

from mukron.report.curves import draw_curves
from mukron.report.page import write_report
from mukron.study.drawing import draw_drift, draw_search, draw_transfer

__all__ = ["draw_curves", "draw_drift", "draw_search", "draw_transfer", "write_report"]
