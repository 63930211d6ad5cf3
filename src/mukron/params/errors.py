"""The one error of this room."""


class ParametrizationError(ValueError):
    """A network, its base shapes or a saved plan do not fit together; the message says where and the way out."""
