"""Which directories of a server a lab may name as data. Both sides check: lab.yaml's path here, and
on the server also what the path leads to through links.
"""

from .containment import is_contained

# Directories of the system, of root, of labctl, and temporary ones: none of them is data.
_PRIVATE = (
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt/labctl",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/snap",
    "/sys",
    "/tmp",
    "/usr",
    "/var",
)


def describe_problem(path: str, home: str = "") -> str:
    """Say why a lab may not use this directory of a server as data; "" if it may.

    `home` is the account's home directory, "" where it is not known.
    """
    if not path.startswith("/") or not path.isprintable():
        return "it is not a full path, such as /datasets/imagenet"
    if path == "/":
        return "it is the whole server"
    if not is_contained(path[1:]):
        return "a full path without `..` and `//` is needed"
    if any(part.startswith(".") for part in path.split("/")):
        return "hidden directories may hold keys and passwords"
    private = (*_PRIVATE, f"{home}/labctl") if home else _PRIVATE
    for directory in private:
        if _is_below(path, directory):
            return f"{directory} belongs to the system or to labctl"
        if _is_below(directory, path):
            return f"it contains {directory}, which belongs to the system or to labctl"
    return ""


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
