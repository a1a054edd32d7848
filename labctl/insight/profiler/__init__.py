"""Profiling a run's own program, whatever it is: what goes into the container, and what comes out.

`sitecustomize` is a program for the container's Python, which imports it at its start; `trace`
reads what PyTorch's profiler wrote, there and here. Both use the standard library alone and keep to
Python 3.8. `advice` (here alone) says what to make of the figures.
"""
