"""Submitting and receiving: assignments, bundles and signed receipts.

The pure parts: `assignment` (the rules, including lateness), `manifest` and `bundle` (a plain tar
and its permitted contents), `leaks` (secrets that must not be in it, besides the hazards that
`labctl.wire.judge` finds), `receipt` (signed by the receiver). `receiver` is the receiver's
directory, `service` answers one student over SSH, `buckets` and `collect` do the same through a
bucket. `examination` inspects a bundle in a process of its own, which `confinement` sandboxes.

May import: insight and the layers below; not lifecycle.
"""

from __future__ import annotations

# The student's copy of an assignment, next to lab.yaml.
ASSIGNMENT_FILE = "assignment.yaml"

# The only command that a student's ssh may request; the rest arrives on standard input.
REQUEST = "labctl-submit"
