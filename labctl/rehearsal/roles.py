"""The instance profile that every rehearsed account has, as docs/aws.md has people make it."""

from __future__ import annotations

from labctl.rehearsal.backend import Backend

PROFILE = "labctl-server"
TRUST = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole",'
    ' "Principal": {"Service": "ec2.amazonaws.com"}}]}'
)


def stock(backend: Backend) -> None:
    """A role and a profile of one name. What the role may do is not checked."""
    with backend.held():
        iam = backend.of("iam", "aws")
        iam.create_role(PROFILE, TRUST, "/", None, "", [], "3600")
        iam.create_instance_profile(PROFILE, "/", [PROFILE])
