"""All that the sample project's programs import, for processes that are forked from this one."""

from __future__ import annotations

import evaluate  # noqa: F401
import torch
import train  # noqa: F401

# A fork of a process that has worker threads would wait for them.
torch.set_num_threads(1)
# The first optimizer imports as much as PyTorch itself.
torch.optim.AdamW([torch.zeros(1)])
