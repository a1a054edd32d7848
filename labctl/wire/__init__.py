"""What labctl and its programs on servers share: messages, and code that both sides need.

Messages are NamedTuples (`codec` converts them to JSON and back). `verbs` defines what a verb is.
`runs`, `images`, `services`, `sandbox`, `files`, `mirrors`, `watchdog`, `telemetry` and `broker`
have the verbs and stored records of the agent, `keeper` and `receiver` those of a course's keeper
and its receiver (`line_requests`: one line of JSON each way), and `kept_labs` the messages of a
keeper of labs.

`judge` decides whether loading or unpacking a file could do harm (`judge_file`), with `pickles`
(what a pickle would call) and `archives` (whether every reader finds the same files in a zip
archive). `tar` reads the headers of a tar archive, `containment` checks that a path from elsewhere
stays in its directory, and `server_paths` which directories of a server may be data. `text` writes
durations, sizes and dollars for people, `boot_id` identifies a boot of a machine,
`model_files` finds a model among a run's files, `docker_archives` runs `docker save` and
`docker load`, and `s3` is labctl's only S3 client.

Standard library of Python 3.8 only (`s3` imports boto3 on its first request); imports nothing of
labctl, and everything may import it.
"""
