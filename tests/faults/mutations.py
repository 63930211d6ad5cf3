"""Changes of files: of what a JSON file says, and of the bytes of any file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 1.5, -0.5, 1e308, 10**400, 2**63, float("inf"), float("nan")),
    *(
        "",
        "x",
        "zero",
        "-1",
        "1/0",
        "0/7",
        "1e999999999",
        "1e-99999999",
        "9" * 5000,
        "\x1b[31m",
        "\ud800",
        "a:b",
        "1/3",
    ),
    *([], {}, [[]], [1], ["x"], {"x": 1}, {"": []}, [None, None]),
)


def changed_json(content: Any, rng: random.Random) -> str:
    """The text of JSON data of which one place was changed.

    Args:
        content: The data.
        rng: Chooses place and change.
    """
    content = copy.deepcopy(content)
    places = list(_places(content))
    parent, key = rng.choice(places)
    change = rng.choice(("value", "value", "value", "value", "delete", "add", "copy", "neighbour"))
    if change == "delete":
        del parent[key]
    elif change == "add":
        if isinstance(parent, dict):
            parent[rng.choice(("", "x", "format", "é"))] = rng.choice(VALUES)
        else:
            parent.append(rng.choice(VALUES))
    elif change == "copy":
        other, name = rng.choice(places)
        parent[key] = copy.deepcopy(other[name])
    elif change == "neighbour" and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = rng.choice((parent[key] + 1, -parent[key], parent[key] * 1000, str(parent[key])))
    else:
        parent[key] = rng.choice(VALUES)
    return json.dumps(content)


def changed_json_text(text: str, rng: random.Random) -> str:
    """The text of any JSON value of which one place was changed.

    Args:
        text: The text.
        rng: Chooses place and change.
    """
    return changed_json([json.loads(text)], rng)[1:-1]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes that were flipped, cut, cleared, repeated or inserted in one place.

    Args:
        content: The bytes.
        rng: Chooses place and change.
    """
    start = rng.randrange(max(1, len(content)))
    end = min(len(content), start + rng.choice((1, 2, 8, 100, 1000)))
    change = rng.choice(("flip", "cut", "clear", "drop", "repeat", "insert", "nest"))
    if change == "cut":
        return content[:start]
    if change == "nest":
        return b"[" * rng.choice((100, 100_000)) + content[start:]
    piece = {
        "flip": bytes([content[start] ^ (1 << rng.randrange(8))]) + content[start + 1 : end] if content else b"",
        "clear": bytes(end - start),
        "drop": b"",
        "repeat": 2 * content[start:end],
        "insert": rng.randbytes(rng.choice((1, 8, 100))) + content[start:end],
    }[change]
    return content[:start] + piece + content[end:]


def changes(content: bytes, seed: int) -> bytes:
    """The change of a number: every third one of bytes, the others of what JSON says.

    Args:
        content: The file.
        seed: The number.
    """
    rng = random.Random(seed)
    if seed % 3 == 0:
        return changed_bytes(content, rng)
    lines = content.decode().splitlines()
    if len(lines) > 1 and lines[0].endswith("}"):  # JSON lines
        number = rng.randrange(len(lines))
        lines[number] = changed_json_text(lines[number], rng)
        return "\n".join([*lines, ""]).encode(errors="surrogatepass")
    return changed_json(json.loads(content), rng).encode(errors="surrogatepass")


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    entries: Any = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        yield content, key
        if isinstance(value, (dict, list)):
            yield from _places(value)
