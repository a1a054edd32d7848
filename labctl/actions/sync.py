"""Files to and from a server. What the layers above call; the flows are in the modules named."""

from labctl.actions.edits import EditsResult, pull_code, pull_edits
from labctl.actions.fetch import Fetched, fetch_data
from labctl.actions.local_results import Missing
from labctl.actions.pull import PulledRun, PullResult, pull, verify
from labctl.actions.push import PushResult, push
from labctl.actions.scan import scan_code, scan_data

__all__ = [
    "EditsResult",
    "Fetched",
    "Missing",
    "PullResult",
    "PulledRun",
    "PushResult",
    "fetch_data",
    "pull",
    "pull_code",
    "pull_edits",
    "push",
    "scan_code",
    "scan_data",
    "verify",
]
