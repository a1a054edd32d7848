"""The server itself: its paths, Docker Engine, GPUs, metrics, root and background processes."""
