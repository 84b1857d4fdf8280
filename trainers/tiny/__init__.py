"""Two policies of less than a million parameters that learn on one core: `tiny-vlm` (Qwen2.5-VL) and `tiny-text` (Qwen3).

`make_tiny` writes one as an ordinary Hugging Face folder; `cached_tiny` keeps it in the user's cache.
"""

from .make import KINDS, cached_tiny, make_tiny, tiny_path

__all__ = ["KINDS", "cached_tiny", "make_tiny", "tiny_path"]
