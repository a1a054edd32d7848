"""The rules of `labctl explain`: why a run is slow or wrong. Pure functions of a `RunData`.

docs/explain.md lists them. `evidence` defines their input and output, `sources` their references.
Each other module holds the rules about one topic, and `diagnosis` applies them all.
"""
