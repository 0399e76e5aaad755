"""What ``benchmarks/compare.py`` is made of.

The processes of both systems (`comparison.ours`, `comparison.official`) run a `comparison.job`
that knows neither of them; the other modules start the processes, measure, and report.
"""
