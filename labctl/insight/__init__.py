"""Insight: what a lab and its runs need, do and did.

`estimate` before anything is paid for, `top` while a server works, `explanation` (rules in
`explain/`) and `profile` (`profiler/`) for why a run is slow or wrong, `run_report` (`report/`) for
its results, `scalars`, `telemetry` and `speedup` for what it recorded.

May import: services, runs, sync, stores, servers and the layers below.
"""
