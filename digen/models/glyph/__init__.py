"""The bundled small text-to-image model: Qwen-Image's architecture at 32 x 32 pixels, about 1.3 M parameters.

Everything it needs lies in this folder, in diffusers format; `examples/pretrain_glyph.py` made it.
"""

from __future__ import annotations

from pathlib import Path

from digen.models.qwen_image import QwenImage

_HERE = Path(__file__).parent


class Glyph(QwenImage):
    """Bundled small model: draws a quoted text on 32 x 32 pixels; learns on a laptop in minutes (this project)."""

    default_path = str(_HERE)
