"""Images in a conversation: how many placeholder tokens each takes, and their positions (m-rope).

Paper: appendix D (Qwen2.5-VL). A text run never comes here.
"""

from typing import Any

import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize


def grid(image: np.ndarray, image_processor: Any) -> tuple[int, int]:
    """Return rows and columns of placeholder tokens of an image (uint8 [H, W, 3])."""
    cell = image_processor.patch_size * image_processor.merge_size
    low, high = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    height, width = smart_resize(*image.shape[:2], factor=cell, min_pixels=low, max_pixels=high)
    return height // cell, width // cell


def expand(tokens: list[int], image_token_id: int, grids: list[tuple[int, int]]) -> list[int]:
    """Repeat each image's single placeholder rows x columns times."""
    sizes = iter(h * w for h, w in grids)
    return [i for token in tokens for i in [token] * (next(sizes) if token == image_token_id else 1)]


def m_rope_positions(is_image: np.ndarray, grids: list[tuple[int, int]], start: int) -> np.ndarray:
    """Return position ids from `start`, int64 [3, T] (time, row, column; all equal for text). `is_image`: bool [T].

    An image of h x w placeholders takes max(h, w) positions: its row r is at start + r, its column c at start + c. The
    text after it goes on from there. Raises ValueError if images and placeholders do not fit together.
    """
    out = np.empty((3, len(is_image)), dtype=np.int64)
    placeholders = np.flatnonzero(is_image)
    if len(placeholders) != sum(h * w for h, w in grids):
        raise ValueError(f"{len(placeholders)} image placeholders for images of {grids}")
    at = taken = 0
    for h, w in grids:
        first = placeholders[taken]
        out[:, at:first] = start + np.arange(first - at)
        start += first - at
        out[:, first : first + h * w] = start + np.stack([np.zeros(h * w), *np.divmod(np.arange(h * w), w)])
        start, at, taken = start + max(h, w), first + h * w, taken + h * w
    out[:, at:] = start + np.arange(len(is_image) - at)
    return out
