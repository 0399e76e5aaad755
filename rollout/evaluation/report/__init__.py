"""The report of a run: one HTML file that needs nothing else, and that nothing in it can harm."""

from rollout.evaluation.report.page import write_report

__all__ = ["write_report"]
