"""Tables in HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table of texts, shown as they are; without a head if there are no heads."""
    lines = [_line("th", heads)] if heads else []
    lines += [_line("td", row) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _line(tag: str, texts: Sequence[str]) -> str:
    cells = [text if isinstance(text, Html) else escape(text) for text in texts]
    return f"<tr>{''.join([f'<{tag}>{cell}</{tag}>' for cell in cells])}</tr>"
