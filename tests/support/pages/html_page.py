"""Reads a page of a report as a browser would."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}
FETCHED = ("src", "href", "xlink:href", "action", "data", "poster")


class Page(HTMLParser):
    """Tags in balance, ids, addresses, text; anything a browser would fetch or execute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opened."""
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name == "id":
                self.ids.append(value or "")
            if name in FETCHED:
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opened and closed."""
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closed."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Said."""
        self.text.append(data)


def fetches_nothing(text: str, page: Page) -> None:
    """The page is one balanced file whose links lead to its own parts, or to files beside it."""
    assert page.open == []
    assert page.tags["img"] == page.tags["iframe"] == page.tags["object"] == 0
    assert not [u for u in re.findall(r"https?://[^\s\"'<]+", text) if "www.w3.org/" not in u]
    assert "@import" not in text and not re.search(r"url\((?!#)", text) and "fetch(" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {a[1:] for a in page.addresses if a.startswith("#")} <= set(page.ids)


def regular_tables(markdown: str) -> None:
    """All rows of a table in Markdown have as many cells, and no text is markup."""
    width = 0
    for line in markdown.splitlines():
        bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not bars or not width or bars == width, line
        width = bars
    assert "<script" not in markdown.replace("\\<", "")


def drawings(text: str, kind: str = "") -> list[ET.Element]:
    """The drawings of a page, each well-formed; those inside others are part of them. ``kind``:
    their class, empty: all.
    """
    depth, start, found = 0, 0, []
    for tag in re.finditer(r"<(/?)svg\b", text):
        start = tag.start() if depth == 0 else start
        depth += -1 if tag[1] else 1
        if depth == 0:
            found.append(ET.fromstring(text[start : tag.end() + 1]))
    return [one for one in found if not kind or one.get("class") == kind]
