"""The life of a lab: up, down, status, recovery, restore, export and import, reconciliation.

Flows over the rooms below, one file each. `up` gets a server ready, `down` ends it after its
results are saved, `recover` continues a run on another server, `reclaim` rehearses that,
`reconcile` merges what a keeper did, `fleet` handles the servers of many labs at once.

May import: insight, services, runs, sync, stores, servers and the layers below; not the keeper,
courses or submissions.
"""
