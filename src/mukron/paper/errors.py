"""The error of the reproduction."""


class ReproductionError(ValueError):
    """A recipe, its options or its stored results are invalid; the message says what to do.

    Example:
        >>> from mukron.paper import Outcome
        >>> Outcome.load("no-such-folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        mukron.paper.errors.ReproductionError: no-such-folder/result.json: cannot be read: ...
    """
