"""Every registered provider under the same tests.

For a provider called NAME, write a module with a fixture `NAME_case` that gives a `Case` and takes
everything away again, and import it here. A provider without one fails the suite.
"""

from __future__ import annotations

import pytest
from aws_case import aws_case, aws_rehearsal
from case import Case
from course_case import course_case, course_keeper
from local_case import local_case, local_provider
from slurm_case import slurm_case, slurm_cluster
from static_case import static_case, static_machines

from labctl.providers import list_provider_names

__all__ = [
    "aws_case",
    "aws_rehearsal",
    "course_case",
    "course_keeper",
    "local_case",
    "local_provider",
    "slurm_case",
    "slurm_cluster",
    "static_case",
    "static_machines",
]


# Its end-to-end tests, which always run, use a cluster of their own.
WITH_LONG = ("slurm",)


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.long if name in WITH_LONG else ())
        for name in list_provider_names()
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
