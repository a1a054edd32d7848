"""Objects of EC2's metadata service, with its own names."""

from typing import NamedTuple


class InstanceAction(NamedTuple):
    """spot/instance-action: what will happen at `time`, such as "2017-09-18T08:22:00Z"."""

    action: str = ""
    time: str = ""


class RebalanceRecommendation(NamedTuple):
    """events/recommendations/rebalance."""

    noticeTime: str = ""
