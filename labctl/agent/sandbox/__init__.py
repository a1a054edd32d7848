"""Sandboxes for untrusted programs, without a network: evaluations and grading."""
