"""The profiler of a run's program: what runs inside the container, and how its trace is read.

The container's Python imports `sitecustomize` at its start; `trace` reads what PyTorch's profiler
wrote, there and here; `memory` finds out what memory holds; `trace_server` serves the page. All use
only the standard library and Python 3.8. `explain/profile.py` interprets the figures.
"""
