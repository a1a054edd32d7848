"""The instance profile of every rehearsed account, like the one that docs/aws.md describes."""

from __future__ import annotations

from labctl.rehearsal.aws.backend import Backend

PROFILE = "labctl-server"
TRUST = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole",'
    ' "Principal": {"Service": "ec2.amazonaws.com"}}]}'
)


def add_instance_profile(backend: Backend) -> None:
    """Create an instance profile, and a role of its name. Its permissions are not checked."""
    with backend.lock():
        iam = backend.get_moto_backend("iam", "aws")
        iam.create_role(PROFILE, TRUST, "/", None, "", [], "3600")
        iam.create_instance_profile(PROFILE, "/", [PROFILE])
