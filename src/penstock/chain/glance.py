"""What a notebook shows of a dataset: its steps, and three items drawn small. No network; all text is escaped."""

import base64
import struct
import zlib
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source

__all__ = ["show_html"]

_ITEMS, _PIXELS, _POINTS, _LETTERS = 3, 96, 200, 80


def show_html(source: Source, steps: Iterable[tuple[str, str]]) -> str:
    """Return a table of the steps, and one of the first items."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in steps)
    return f"<table>{rows}</table>{_show_items(source)}"


def _show_items(source: Source) -> str:
    n_items = min(_ITEMS, len(source.index))
    try:
        block = source.take(np.arange(n_items))
    except Exception as error:  # a glance says what is wrong, and never hides the steps
        return f"<p>{escape(f'{type(error).__name__}: {error}')}</p>"
    head = "".join(f"<th>{escape(name or 'item')}</th>" for name in block)
    rows = [[draw_value(block[name][row]) for name in block] for row in range(n_items)]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def draw_value(value: Any) -> str:
    """Return an image as a PNG, a signal as a line, a single value as itself, and anything else in words."""
    array = np.asarray(value) if hasattr(value, "dtype") or hasattr(value, "__array__") else None
    if array is None or array.dtype.kind not in "biuf" or array.ndim == 0:
        text = str(array.item() if array is not None and array.ndim == 0 else value)
        return escape(text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…")
    title = escape(f"{array.dtype} {array.shape}")
    numbers = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    image = _as_image(numbers)
    if image is not None:
        return f'<img title="{title}" src="data:image/png;base64,{base64.b64encode(_encode_png(image)).decode()}">'
    if array.ndim == 1 and len(array) > 1:
        return _draw_line(numbers, title)
    return title


def _as_image(array: NDArray[np.float64]) -> NDArray[np.uint8] | None:
    """Return (height, width) or (height, width, 3) bytes; None if an array does not look like an image."""
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] > 4:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3:
        array = array[..., :3] if array.shape[2] in (3, 4) else array[..., array.shape[2] // 2]
    if array.ndim not in (2, 3) or min(array.shape[:2]) < 4:
        return None
    steps = [max(1, -(-size // _PIXELS)) for size in array.shape[:2]]
    small = array[:: steps[0], :: steps[1]]
    low, high = float(small.min()), float(small.max())
    scaled: NDArray[np.uint8] = ((small - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return scaled


def _encode_png(image: NDArray[np.uint8]) -> bytes:
    height, width = image.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if image.ndim == 2 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _draw_line(array: NDArray[np.float64], title: str) -> str:
    points = array[:: max(1, -(-len(array) // _POINTS))]
    low, high = float(points.min()), float(points.max())
    heights = 30 - 28 * (points - low) / ((high - low) or 1)
    path = " ".join(f"{x * 120 / max(1, len(points) - 1):.1f},{y:.1f}" for x, y in enumerate(heights.tolist()))
    line = f'<polyline points="{path}" fill="none" stroke="currentColor"/>'
    return f'<svg width="122" height="32"><title>{title}</title>{line}</svg>'
