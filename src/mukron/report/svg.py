"""Prepare an SVG of matplotlib for an HTML page with several figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

HREF = "{http://www.w3.org/1999/xlink}href"


def inline(svg: str, name: str, title: str, description: str) -> str:
    """Return the <svg> element with unique ids, a title and description for screen readers, and a flexible size."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # The style sheet would apply to the whole page; the page has its own for figures.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _renamed(key, value, name) for key, value in element.attrib.items()}
    width = float(root.attrib.pop("width").removesuffix("pt")) * 4 / 3
    del root.attrib["height"]
    root.attrib.update(role="img", id=name, style=f"--natural: {width:.0f}px")
    root.attrib["aria-labelledby"] = f"{name}-title {name}-description"
    for number, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, id=f"{name}-{'title' if tag == 'title' else 'description'}")
        element.text = text
        root.insert(number, element)
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", HREF):
        return re.sub(r"^#", f"#{name}-", value)
    return value.replace("url(#", f"url(#{name}-")
