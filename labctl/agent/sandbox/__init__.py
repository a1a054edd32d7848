"""Programs of strangers in containers without a network: evaluations and grading."""
