"""A simulated Lambda on this machine: `labctl rehearse lambda`, and the test bed of its provider.

`LambdaRehearsal(LambdaScenario(), building)` is a context manager; docs/lambda.md says what it
knows of Lambda. `description.yaml` is its API as Lambda documents it.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.lambda_cloud.scenario import LambdaScenario

if TYPE_CHECKING:
    from labctl.rehearsal.lambda_cloud.simulation import LambdaRehearsal

__all__ = ["LambdaRehearsal", "LambdaScenario"]

__getattr__ = offer_names(__name__, {"LambdaRehearsal": "simulation"})
