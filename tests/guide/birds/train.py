"""Stands for a student's own training script."""
