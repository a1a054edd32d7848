"""Runs: started exactly once, followed through cut links, canceled, probed, evaluated.

`run_specs` says what a run is, `runs` talks to the agent about runs, `images` gets a run's image
onto the server (from where: `image_sources`; how this machine keeps it: `image_cache`,
`image_jobs`; without a Dockerfile of the lab: `environment`), `outputs` and `saved_copies` get its
results from the server or from where they were saved, `probe` predicts a whole run from a short
one, `evaluate` measures a checkpoint, `provenance` records where a run came from, `active_runs`
names those that a new one starts beside.

May import: sync, stores, servers and the layers below.
"""
