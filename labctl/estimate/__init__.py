"""What a model needs: bytes, operations, hours. Pure functions of a Plan.

docs/estimate.md explains them. `plan` says what is asked, `memory` and `compute` answer, `fits`
compares with GPUs, `advice` tells whether a GPU is needed at all and what to change. `measure` is a
program for the lab's own Python. Bytes are per GPU; a GB in what people read is 10^9 of them.
"""
