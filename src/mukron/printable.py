"""Text from files on a terminal: without what a terminal would obey."""

from __future__ import annotations


def printable(text: str) -> str:
    """Write control characters as their escapes, so that no text moves the cursor, sets colours or titles.

    Args:
        text: Any text, perhaps from a file that somebody sent.

    Returns:
        The same text, if it holds no such character. Line ends and tabs stay.

    Example:
        >>> print(printable("one" + chr(27) + "[2Jtwo"))
        one\\x1b[2Jtwo
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
