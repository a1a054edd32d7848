"""GPU lab servers for students and instructors."""

__version__ = "0.1.0"
