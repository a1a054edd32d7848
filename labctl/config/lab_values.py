"""The merged values of a lab: from lab.yaml and every layer over and below it."""

from __future__ import annotations

from pathlib import Path

from labctl.config.document import Node
from labctl.config.layers import iterate_leaves
from labctl.config.reader import LAB_FILE, make_problem
from labctl.errors import Problem


class LabValues:
    """The values of a lab that lies at `path`, and the problems that their readers find."""

    def __init__(self, path: Path, home: Path, top: Node, problems: list[Problem]) -> None:
        assert isinstance(top.value, dict)
        self.path = path
        self.home = home
        self.nodes = top.value
        self.leaves = dict(iterate_leaves(top))
        self.problems = problems

    def find_leaf(self, path: str) -> Node:
        """Return the leaf at a dotted path, or an empty one."""
        return self.leaves.get(path, Node(None, 0, LAB_FILE))

    def refuse_settings(self, *reasons: tuple[str, str]) -> None:
        """Report each of these settings that lab.yaml or another layer has, with its reason."""
        for key, why in reasons:
            node = self.nodes.get(key) if key == "image" else self.leaves.get(key)
            if node is not None and node.value is not None:
                self.problems.append(make_problem(node, key, why))

    def report(self, key: str, message: str) -> None:
        """Report a problem at the leaf with a dotted path."""
        self.problems.append(make_problem(self.find_leaf(key), key, message))
