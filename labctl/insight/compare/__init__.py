"""The comparison of several runs of a lab. Pure functions from their facts to a `ComparisonResult`.

`mcnemar` tests whether two accuracies differ, `pairs` does so for what two models predict,
`settings` finds what was set differently, `curves` puts the runs' curves into one chart,
`comparison` is the whole.
"""
