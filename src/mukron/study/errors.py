"""The error of studies."""


class StudyError(ValueError):
    """A study is not possible, or its storage or record cannot be used; the message says what to change."""
