"""What the files of a project import and do, and the packages on PyPI that have the imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from labctl.decoding import decode_json
from labctl.model import Value

MAX_SOURCE_BYTES = 1024 * 1024
# the variables of a launcher that a program reads to know which of its processes it is
RANKS = ("RANK", "LOCAL_RANK")
# import -> package, where the names differ. "": PyPI has no package of this name that is meant.
PACKAGES = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "IPython": "ipython",
    "OpenGL": "PyOpenGL",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "apex": "",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "clip": "clip @ git+https://github.com/openai/CLIP.git",
    "community": "python-louvain",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "google.auth": "google-auth",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "google.colab": "",
    "google.genai": "google-genai",
    "google.generativeai": "google-generativeai",
    "google.oauth2": "google-auth",
    "google.protobuf": "protobuf",
    "hydra": "hydra-core",
    "imblearn": "imbalanced-learn",
    "jwt": "PyJWT",
    "lightning_fabric": "lightning-fabric",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "osgeo": "GDAL",
    "pkg_resources": "setuptools",
    "pl_bolts": "lightning-bolts",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "pynvml": "nvidia-ml-py",
    "pytorch_lightning": "pytorch-lightning",
    "ruamel": "ruamel.yaml",
    "segment_anything": "segment-anything @ git+https://github.com/facebookresearch/"
    "segment-anything.git",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "sksurv": "scikit-survival",
    "umap": "umap-learn",
    "websocket": "websocket-client",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}
# Directories of modules of many packages: what they contain decides.
NAMESPACES = frozenset({"google"})


class ModuleFacts(Value, frozen=True):
    """What one file imports and does, as its text shows.

    `names` are full names; `is_relative` is whether it imports from its own package (`.x`).
    `is_library` is whether it only defines what other files use. A file that `needs_rank` fails
    unless a launcher such as torchrun sets RANK or LOCAL_RANK; one that `can_be_distributed` starts
    a process group.
    """

    names: frozenset[str] = frozenset()
    is_relative: bool = False
    is_library: bool = False
    needs_rank: bool = False
    can_be_distributed: bool = False

    @property
    def tops(self) -> frozenset[str]:
        return frozenset(name.partition(".")[0] for name in self.names)


class _NotebookCell(Value, frozen=True):
    cell_type: str = ""
    source: str | tuple[str, ...] = ""


class _NotebookFile(Value, frozen=True):
    cells: tuple[_NotebookCell, ...] = ()


def read_source(file: Path) -> str:
    """Return the text of a source file; "" if it cannot be read, or is too large for source."""
    try:
        if file.stat().st_size > MAX_SOURCE_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_module(file: Path) -> ModuleFacts:
    """Return the facts of a module or notebook; none if it is not valid Python."""
    try:
        text = read_source(file)
        tree = ast.parse(read_notebook_code(text) if file.suffix == ".ipynb" else text)
    except (SyntaxError, ValueError, RecursionError):
        return ModuleFacts()
    names: set[str] = set()
    is_relative = reads_rank = can_be_distributed = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_relative = is_relative or bool(node.level)
            if node.module and not node.level:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Subscript):
            reads_rank = reads_rank or _is_rank(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            can_be_distributed = can_be_distributed or called == "init_process_group"
    return ModuleFacts(
        names=frozenset(names),
        is_relative=is_relative,
        is_library=_is_library(tree.body),
        needs_rank=reads_rank and not any(_handles_missing_rank(node) for node in ast.walk(tree)),
        can_be_distributed=can_be_distributed,
    )


def _is_rank(node: ast.Subscript) -> bool:
    """Whether this is os.environ["LOCAL_RANK"], which fails where the variable is not set."""
    return (
        isinstance(node.ctx, ast.Load)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in RANKS
        and ast.unparse(node.value).rpartition(".")[2] == "environ"
    )


def _handles_missing_rank(node: ast.AST) -> bool:
    """Whether this sets a rank, starts processes itself, or asks whether a rank is set.

    That is `environ["RANK"] = "0"`, `spawn(...)`, `environ.get("RANK")`, or `"RANK" in environ`.
    """
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return isinstance(node.slice, ast.Constant) and node.slice.value in RANKS
    if isinstance(node, ast.Compare):
        return isinstance(node.left, ast.Constant) and node.left.value in RANKS
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func).rpartition(".")[2]
    first = node.args[0] if node.args else None
    is_rank = isinstance(first, ast.Constant) and first.value in RANKS
    return called == "spawn" or (called in {"get", "getenv", "setdefault"} and is_rank)


def _is_library(body: list[ast.stmt]) -> bool:
    """Whether there are functions or classes, and nothing that uses them when Python runs it."""
    defines = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in body)
    return defines and not any(_does_something(node) for node in body)


def _does_something(node: ast.stmt) -> bool:
    """Whether a statement at the top of a file is more than an import or a definition."""
    if isinstance(node, ast.If):
        return "__name__" in ast.unparse(node.test) or any(map(_does_something, node.body))
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, (ast.For, ast.While, ast.With))


def read_notebook_code(notebook: str) -> str:
    """Return the code of a notebook without IPython's own commands; ValueError if it is not one."""
    cells = decode_json(notebook, _NotebookFile).cells
    lines = [
        line
        for cell in cells
        if cell.cell_type == "code"
        for line in "".join(cell.source).splitlines()
        if not re.match(r"\s*[%!]", line)
    ]
    return "\n".join(lines)


def list_packages(imports: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """Return the packages of full module names, without Python's own modules and the project's."""
    own = {part.removesuffix(".py") for name in files for part in Path(name).parts}
    packages = {
        _find_package(name)
        for name in imports
        if name.partition(".")[0] not in own | sys.stdlib_module_names
    }
    return tuple(sorted(packages - {""}, key=str.lower))


def _find_package(module: str) -> str:
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in PACKAGES:
            return PACKAGES[name]
    return "" if parts[0] in NAMESPACES else parts[0]
