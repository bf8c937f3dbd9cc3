"""What would ruin a run, found before it starts."""

from __future__ import annotations

from treespark.doctor.examination import Surroundings, examine
from treespark.doctor.report import Finding, Report

__all__ = ["Finding", "Report", "Surroundings", "examine"]
