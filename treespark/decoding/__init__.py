"""Speculative decoding: one loop for plain decoding, chains and trees, and rounds simulated on known text."""

from treespark.decoding.compare import Comparison, compare_outputs
from treespark.decoding.loop import Decoding, decode, decode_plain
from treespark.decoding.record import DecodeResult, Round
from treespark.decoding.simulate import check_text, simulate
from treespark.decoding.stop import StopRules
from treespark.decoding.verify import Walk, walk

__all__ = [
    "Comparison",
    "DecodeResult",
    "Decoding",
    "Round",
    "StopRules",
    "Walk",
    "check_text",
    "compare_outputs",
    "decode",
    "decode_plain",
    "simulate",
    "walk",
]
