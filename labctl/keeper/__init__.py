"""The keeper: an always-on process that checks labs and recovers their runs.

`scheduler` is the loop, with a back-off for each task; courses use it too. `labs` are the tasks of
`labctl keep`, one for each lab; `workers` are its processes for labs that need more than a check,
`recovery_worker` is what one of them does.

May import: lifecycle and the layers below.
"""
