"""The reproduction of the paper: one recipe per figure or table, with the paper's claims and checks that can fail."""

# The recipes, in the order in which they are listed.
from mukron.paper import tables, coordinate, nngp, exponents, embeddings, transfer, imagenet, wide, damped  # noqa: F401, I001
from mukron.paper.errors import ReproductionError
from mukron.paper.outcome import Outcome, judge_again, load_evidence, outcomes
from mukron.paper.page import page_of, write_page
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import RECIPES, Claim, Experiment, Finding, Less, Recipe, Scale
from mukron.paper.run import ReproductionProgress, Request, reproduce

__all__ = [
    "RECIPES",
    "Claim",
    "Evidence",
    "Experiment",
    "Finding",
    "Less",
    "Outcome",
    "Recipe",
    "ReproductionError",
    "ReproductionProgress",
    "Request",
    "Scale",
    "judge_again",
    "load_evidence",
    "outcomes",
    "page_of",
    "reproduce",
    "write_page",
]
