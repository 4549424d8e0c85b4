"""HTML as a type of its own, so that text cannot get into a page without being escaped."""

from html import escape

__all__ = ["Html", "joined", "tag"]


class Html(str):
    """Text that is markup already; any other text is escaped where it meets it."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | float | None) -> Html:
    """Return an element. Children that are None, and attributes that are None, are left out.

    Parameters
    ----------
    name
        Of the element; one without children closes itself if HTML or SVG says so.
    attributes
        An underscore stands for a hyphen; one at the end is for words that Python has: `class_`.

    Examples
    --------
    >>> tag("p", "1 < 2 & ", tag("b", "so"), class_="note")
    '<p class="note">1 &lt; 2 &amp; <b>so</b></p>'
    >>> tag("path", d="M0 0h1", stroke_width=2)
    '<path d="M0 0h1" stroke-width="2"/>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children and name in _EMPTY:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*parts: str | None) -> Html:
    """Return parts one after the other, escaped where they are no markup."""
    return Html(
        "".join(part if isinstance(part, Html) else escape(part, quote=False) for part in parts if part is not None)
    )


_EMPTY = {"meta", "img", "path", "rect", "line", "circle", "br", "use"}


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
