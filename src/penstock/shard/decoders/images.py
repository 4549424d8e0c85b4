"""Images as arrays of pixels: as they are stored, or in a requested mode, under the names of the webdataset library."""

import io
from typing import Any, Literal

import numpy as np

from penstock.core.errors import MissingDependency
from penstock.core.limits import check_expansion

__all__ = ["IMAGES", "IMAGE_MODES", "decode_image"]

IMAGES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "gif", "tif", "tiff", "tga", "ico"),
    *("jp2", "j2k", "jpc", "jpf", "jpx", "j2c", "ppm", "pgm", "pbm", "pnm", "pcx"),
)
"""Extensions of images."""

# What those extensions stand for. Files are often named after another one of them, so any is read under any name. Of
# the other formats that Pillow knows, EPS starts a program, and the parsers of rare ones are little tested.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "ICO", "JPEG2000", "PPM", "PCX", "TGA")

_Form = Literal["numpy", "torch", "pil"]

IMAGE_MODES: dict[str, tuple[_Form, bool, str]] = {
    "l8": ("numpy", False, "L"),
    "rgb8": ("numpy", False, "RGB"),
    "rgba8": ("numpy", False, "RGBA"),
    "l": ("numpy", True, "L"),
    "rgb": ("numpy", True, "RGB"),
    "rgba": ("numpy", True, "RGBA"),
    "torchl8": ("torch", False, "L"),
    "torchrgb8": ("torch", False, "RGB"),
    "torchrgba8": ("torch", False, "RGBA"),
    "torchl": ("torch", True, "L"),
    "torchrgb": ("torch", True, "RGB"),
    "torch": ("torch", True, "RGB"),
    "torchrgba": ("torch", True, "RGBA"),
    "pill": ("pil", False, "L"),
    "pil": ("pil", False, "RGB"),
    "pilrgb": ("pil", False, "RGB"),
    "pilrgba": ("pil", False, "RGBA"),
}
"""Name to the type of the result, whether its values are float32 from 0 to 1, and the mode of Pillow."""


def _pixel_bytes(stored: str, requested: str | None) -> int:
    """Return how many bytes a pixel takes; 4 for modes of Pillow that are rare."""
    if requested is None:
        return {"1": 1, "L": 1, "LA": 2, "I;16": 2, "P": 3, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3}.get(stored, 4)
    _, is_float, colours = IMAGE_MODES[requested]
    return len(colours) * (4 if is_float else 1)


def decode_image(payload: bytes, mode: str | None = None) -> Any:
    """Return the pixels of an image: (height, width, colours), (colours, height, width) as a torch tensor.

    Parameters
    ----------
    mode
        A name in IMAGE_MODES. None: the colours that are stored; palettes and prints become RGB.
    """
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("Pillow", "image", "Decoding images") from error
    try:
        opened = Image.open(io.BytesIO(payload), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(
            f"it is not an image of {', '.join(_FORMATS)}, but begins with {payload[:8]!r}; convert it to one of these"
        ) from error
    with opened as image:
        n_pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if limit is not None and n_pixels > limit:
            raise ValueError(
                f"its {image.width} × {image.height} pixels are more than Pillow allows; if they are valid, set "
                "PIL.Image.MAX_IMAGE_PIXELS to the number of pixels to allow, or to None"
            )
        pixel_bytes = _pixel_bytes(image.mode, mode)
        what = f"its image of {image.width} × {image.height} pixels"
        check_expansion(what, pixel_bytes * n_pixels, len(payload), error=ValueError)
        if mode is None:
            return np.array(image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else image)
        form, is_float, colours = IMAGE_MODES[mode]
        image.load()
        converted = image.convert(colours)
    if form == "pil":
        return converted
    pixels: np.ndarray[Any, Any] = np.array(converted)
    if is_float:
        pixels = pixels.astype(np.float32) / 255.0
    if form == "numpy":
        return pixels
    import torch  # noqa: PLC0415

    return torch.from_numpy(pixels.transpose(2, 0, 1).copy() if pixels.ndim == 3 else pixels)
