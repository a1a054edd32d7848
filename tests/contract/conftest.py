"""Every registered provider under the same tests.

For a provider called NAME, write a module with a fixture `NAME_case` that gives a `Case` and takes
everything away again, and import it here. A provider without one fails the suite.
"""

from __future__ import annotations

import pytest
from aws_case import aws_cache_dir, aws_case, aws_rehearsal
from azure_case import azure_case, azure_rehearsal
from case import Case
from course_case import course_case, course_keeper
from gcp_case import gcp_case, gcp_rehearsal
from lambda_case import lambda_case, lambda_rehearsal
from local_case import local_case, local_provider
from runpod_case import runpod_case, runpod_rehearsal
from slurm_case import slurm_case, slurm_cluster
from static_case import static_case, static_machines
from vast_case import vast_case, vast_rehearsal

from labctl.providers import Marketplace, get_provider_class, list_provider_names

__all__ = [
    "aws_cache_dir",
    "aws_case",
    "aws_rehearsal",
    "azure_case",
    "azure_rehearsal",
    "course_case",
    "course_keeper",
    "gcp_case",
    "gcp_rehearsal",
    "lambda_case",
    "lambda_rehearsal",
    "local_case",
    "local_provider",
    "runpod_case",
    "runpod_rehearsal",
    "slurm_case",
    "slurm_cluster",
    "static_case",
    "static_machines",
    "vast_case",
    "vast_rehearsal",
]


# A marketplace's servers come from the others, which are tested by themselves.
CREATORS = [
    name for name in list_provider_names() if not issubclass(get_provider_class(name), Marketplace)
]
# The end-to-end tests of slurm, which always run, use a cluster of their own. Of the clouds whose
# machines boot here, aws always runs; the calls of the others are tested on records.
WITH_LONG = ("azure", "gcp", "lambda", "runpod", "slurm", "vast")


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.long if name in WITH_LONG else ()) for name in CREATORS
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    name = f"{request.param}_case"
    try:
        made: Case = request.getfixturevalue(name)
    except pytest.FixtureLookupError as error:
        if error.argname != name:
            raise
        pytest.fail(
            f"the provider {request.param!r} is registered but has no fixture {name!r}: "
            "see tests/contract/conftest.py",
            pytrace=False,
        )
    return made
