"""Grades as values: results in Gradescope's form, a claim against a measurement, and evidence.

Pure. What a submission says of itself is a stranger's word; it is bounded, escaped, and shown to a
person, who decides.
"""
