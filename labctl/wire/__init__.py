"""What both sides must judge alike: labctl here, and the programs that it sends to servers.

`judge` says whether loading or unpacking a file could harm (`judge_file`), with `pickles` (what a
pickle would call) and `archives` (whether every reader finds the same files in a zip archive).
`machine` tells one boot of a machine from every other.
Standard library of Python 3.8 only; imports nothing of labctl, and everything may import it.
"""
