"""The same work done by labctl and by what a user would pick instead, in one run.

`python -m benchmarks` measures, checks that each side did the work, prints one table, and writes
it as JSON below benchmarks/results/. Nothing here is a test: figures drift with the machine, and
the ratios of one run are what counts.
"""
