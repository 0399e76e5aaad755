"""Fixtures of the tests of runs."""

from evaluation.run.fake import server

__all__ = ["server"]
