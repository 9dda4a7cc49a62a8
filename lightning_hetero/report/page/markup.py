"""Markup by type: a plain string, e.g. out of a trace, cannot become any (layer P)."""

from __future__ import annotations

from html import escape

_EMPTY = ("rect", "line", "polyline", "circle")  # elements that may have nothing inside and no end


class Markup(str):
    """HTML as it is meant; a plain string that is put together with it is escaped."""

    __slots__ = ()

    def __add__(self, other: str) -> Markup:
        return joined(self, other)

    def __radd__(self, other: str) -> Markup:
        return joined(other, self)


def joined(*parts: str) -> Markup:
    """Returns one behind the other.

    >>> joined("1 < 2", Markup("<br>"))
    '1 &lt; 2<br>'
    """
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(name: str, *inside: str, **attributes: str) -> Markup:
    """Returns an element; ``class_`` is ``class``, ``fill_opacity`` has a dash, and empty attributes are left out.

    >>> element("p", "a & b", class_="answer")
    '<p class="answer">a &amp; b</p>'
    """
    named = {key.rstrip("_").replace("_", "-"): escape(text) for key, text in attributes.items() if text}
    head = name + "".join(f' {key}="{text}"' for key, text in named.items())
    return Markup(f"<{head}/>" if name in _EMPTY and not inside else f"<{head}>{joined(*inside)}</{name}>")
