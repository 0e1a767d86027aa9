"""The pages that people read: each has text, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def anchors_of(text: str) -> set[str]:
    """Of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_text_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    for target, anchor in _LINK.findall(text):
        if target.startswith(("http:", "https:")):
            continue
        other = (page.parent / target) if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors_of(other.read_text()), f"{page.name}: {target}#{anchor}"
