"""Speculative decoding: one loop for plain decoding, chains and trees, single or batched; rounds on known text."""

from treespark.decoding.batch import BatchDecoding
from treespark.decoding.compare import Comparison, Margins, compare_outputs, text_margins
from treespark.decoding.loop import Decoding, decode, decode_batch, decode_plain
from treespark.decoding.record import DecodeResult, Round
from treespark.decoding.request import Request
from treespark.decoding.simulate import check_text, simulate
from treespark.decoding.stop import StopRules
from treespark.decoding.verify import Walk, judged_edges, walk

__all__ = [
    "BatchDecoding",
    "Comparison",
    "DecodeResult",
    "Decoding",
    "Margins",
    "Request",
    "Round",
    "StopRules",
    "Walk",
    "check_text",
    "compare_outputs",
    "decode",
    "decode_batch",
    "decode_plain",
    "judged_edges",
    "simulate",
    "text_margins",
    "walk",
]
