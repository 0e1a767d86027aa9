"""Each link of the built site leads somewhere, and its pages read as on GitHub."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from tests import ROOT

SITE = ROOT / "build" / "site"


class Page(HTMLParser):
    """What a page links to, its anchors, and the text of its paragraphs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.text: list[str] = []
        self._inside: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside.add(tag)
        for name, value in attrs:
            if name in ("href", "src") and tag != "link":
                self.links.append(unquote(value or ""))
            elif name in ("id", "name"):
                self.anchors.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._inside.discard(tag)

    def handle_data(self, data: str) -> None:
        if self._inside & {"p", "code"} == {"p"}:
            self.text.append(data)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}


def test_each_link_leads_to_a_file_and_to_an_anchor_of_it(pages: dict[Path, Page]) -> None:
    assert len(pages) > 20
    lost = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or anchor not in getattr(pages.get(there), "anchors", {""}):
                lost.append(f"{path.relative_to(SITE)}: {link}")
    assert not lost


def test_the_navigation_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/]+\.md", yaml.safe_dump(config["nav"]))
    there = [
        str(path.relative_to(ROOT / "build" / "docs"))
        for path in Path(ROOT / "build" / "docs").rglob("*.md")
    ]
    assert sorted(listed) == sorted(there)


def test_nothing_of_markdown_is_left_in_a_paragraph(pages: dict[Path, Page]) -> None:
    """Lists, tables and fences that GitHub sees and the site's parser does not."""
    for path, page in pages.items():
        left = re.findall(r"^(?:[-*] |\d+\. |\||```).*", "".join(page.text), re.MULTILINE)
        assert not left, path
