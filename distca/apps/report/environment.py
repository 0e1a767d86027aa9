"""The template environment of the HTML pages of reports and previews."""

from __future__ import annotations

from typing import Any

import jinja2

from distca.process.plain_text import plain


def page_environment(package: str) -> jinja2.Environment:
    """Templates of ``package``: what stands in ``{{ }}`` is escaped for HTML, and shown on one line
    without characters that a browser would obey, such as those that turn the writing round."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=True,
        finalize=_plain,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _plain(value: Any) -> Any:
    # Exactly text: markup, a kind of text, is finished HTML.
    return plain(value) if type(value) is str else value
