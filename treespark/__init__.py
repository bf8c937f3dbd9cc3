"""Train tree drafters for speculative decoding.

`treespark.decode` and `treespark.decode_plain` are loaded when they are first named, so that importing the package
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespark.decoding import decode, decode_plain

__version__ = "0.1.0"
__all__ = ["__version__", "decode", "decode_plain"]


def __getattr__(name: str) -> object:
    if name in ("decode", "decode_plain"):
        from treespark import decoding

        return getattr(decoding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
