"""Multiply matrices on the GPU until killed; print "busy" after the given seconds."""

import sys
import time

import torch

SIZE = 8192

a, b = (torch.randn(SIZE, SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
began, announced = time.monotonic(), False
while True:
    for _ in range(10):
        c = a @ b
    torch.cuda.synchronize()
    if not announced and time.monotonic() - began > float(sys.argv[1]):
        announced = True
        print("busy", flush=True)
