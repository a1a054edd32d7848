"""Code that labctl and the programs that it sends to servers share.

`judge` decides whether loading or unpacking a file could do harm (`judge_file`), with `pickles`
(what a pickle would call) and `archives` (whether every reader finds the same files in a zip
archive). `boot_id` identifies a boot of a machine, and `s3` is labctl's only S3 client.
Standard library of Python 3.8 only (`s3` imports boto3 on its first request); imports nothing of
labctl, and everything may import it.
"""
