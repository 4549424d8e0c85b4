"""HTML as a separate type, so that no text gets into a page without being escaped."""

from html import escape

__all__ = ["Html", "join", "tag"]


class Html(str):
    """Text that is markup; plain text is escaped when it is joined with it."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | float | None) -> Html:
    """Return an element. Children and attributes that are None are left out.

    Parameters
    ----------
    name
        Name of the element; void elements of HTML and SVG close themselves.
    attributes
        An underscore stands for a hyphen; a trailing one is removed, for Python keywords: `class_`.

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
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*parts: str | None) -> Html:
    """Return the parts concatenated; those that are not markup are escaped."""
    return Html(
        "".join(part if isinstance(part, Html) else escape(part, quote=False) for part in parts if part is not None)
    )


_EMPTY = {"meta", "img", "source", "path", "rect", "line", "circle", "br", "use"}


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
