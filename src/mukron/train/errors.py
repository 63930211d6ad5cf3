"""The one error of this room."""


class RunError(ValueError):
    """A run's description, its folder or its checkpoint does not fit; the message says where and the way out."""
