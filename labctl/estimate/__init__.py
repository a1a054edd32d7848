"""Estimate the memory, operations and hours of a model. Pure functions of a Plan.

docs/estimate.md explains them. `plan` is the input, `memory` and `compute` the results, `fits`
compares with GPUs, `advice` decides whether a GPU is needed and suggests changes. `measure` is a
program for the lab's own Python. Bytes are per GPU; a displayed GB is 10^9 bytes.

May import: model, errors, shell and the layers below.
"""
