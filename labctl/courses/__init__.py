"""A course's folder: who is in it, what each seat has spent, what was graded.

Reads and writes files of the folder and nothing else: no network, no provider, no clock of its own.
"""
