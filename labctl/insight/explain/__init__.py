"""Why a run is slow or wrong: rules over what it left. Pure functions of a `Material`.

docs/explain.md lists them. `material` says what they look at and what they answer, `sources` whom
they follow; each other module holds the rules about one thing, and `verdict` asks them all.
"""
