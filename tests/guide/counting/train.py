"""A training that needs nothing but Python: it counts epochs, and goes on from its checkpoint."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs
checkpoint = Path(os.environ["LABCTL_CHECKPOINT_DIR"]) / "epoch.txt"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
done = int(checkpoint.read_text()) if checkpoint.exists() else 0
for epoch in range(done + 1, epochs + 1):
    time.sleep(0.2)
    checkpoint.write_text(str(epoch))
    print(f"epoch {epoch}", flush=True)
