"""The life of a lab: up, down, status, recovery, restore, export and import, reconciliation.

Each file is one flow that uses the packages below. `up` prepares a server, `down` removes it after
its results are saved, `recover` resumes a run on another server, `follow` follows a run across its
servers, `cancel` ends a run, `reclaim` rehearses a recovery, `reconcile` merges what a keeper did,
`fleet` handles servers of many labs at once. `lab_draft`, `sample_project` and `project_templates`
are `labctl init`.

May import: insight, services, runs, sync, stores, servers and the layers below; not the keeper,
courses or submissions.
"""
