"""Handing in and taking in: what an assignment asks, what a bundle is, and what a receipt proves.

The pure parts: `assignment` (the rules, and who is late by them), `manifest` and `bundle` (one
plain tar and what may be in it), `leaks` (what must not be in it, beside what `labctl.wire.judge`
finds), `receipt` (signed by the receiver). `receiver` is the directory that a receiver keeps,
`service` answers one student over SSH, `tickets` and `collect` do the same through a bucket.
`examination` looks into a bundle in a process of its own, which `confinement` shuts in.
"""

from __future__ import annotations

# What a student has of an assignment, beside lab.yaml.
ASSIGNMENT_FILE = "assignment.yaml"

# All that a student's ssh may ask for; the forced command reads the rest on standard input.
REQUEST = "labctl-submit"
