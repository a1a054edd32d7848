"""Sweeps: trials of a run with other parameters, chosen by Optuna, each an ordinary run.

`plan` is what the user wants, `study` the record of the trials in Optuna's journal,
`trial_servers` where trials run, `scheduler` the flow, `metric` what runs report, `costs` what
they cost, and `page` the results as HTML.

Optuna is an extra and is imported by `study` alone, when a sweep needs it.

May import: what `lifecycle` may.
"""
