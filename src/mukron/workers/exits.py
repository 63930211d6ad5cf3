"""Exit codes of worker processes and of commands."""

from __future__ import annotations

DONE = 0
WRONG_REQUEST = 2  # a ValueError: the user can correct it
BROKEN = 3  # any other exception
STOPPED = 130  # by Ctrl-C, as shells have it
