"""The errors of this room."""


class ReproductionError(ValueError):
    """Something about a recipe or its results is not as it must be; says what to do."""
