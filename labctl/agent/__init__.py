"""The agent: the program that runs on the server, for Python 3.8 or newer.

Beyond the standard library it uses the packages in its archive: h11 for the broker of a shared
server, NVIDIA's bindings (pynvml) for GPUs. It uses psutil if the server has it.

`python3 __main__.py VERB` reads one JSON object (a line) from standard input and replies with one
JSON object on a line that begins with MARK, so that output of a login shell does no harm. Verbs
that stream (`follow`, `run`, `build`) write bytes after that line and end with a second marked
line on standard error. Every verb can be repeated: a lost reply costs nothing.

May import: wire only. Nothing outside imports it.
"""
