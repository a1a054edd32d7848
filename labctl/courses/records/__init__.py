"""The records of a course: roster, seats, ledger, grades and costs, as files of its folder.

Reads and writes files of the folder and nothing else: no network, no clock of its own, and of a
provider only the form of its settings.
"""
