"""Benchmarks of the same work done by labctl and by its alternatives, in one run.

`python -m benchmarks` measures, checks that each side did the work, prints one table, and writes
it as JSON below benchmarks/results/. Nothing here is a test: figures drift with the machine, and
the ratios of one run are what counts.
"""
