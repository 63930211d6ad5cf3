"""The one error of this room."""


class StudyError(ValueError):
    """A study's description, its storage or its records do not fit; the message says where and the way out."""
