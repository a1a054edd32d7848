"""What runs on the server: one program, for Python 3.8 or newer.

Beyond the standard library it has what lies beside this package in the archive: h11 for the broker
of a shared server, NVIDIA's bindings (pynvml) for GPUs. psutil is used where the server has it.

`python3 __main__.py VERB` reads one JSON object (a line) on standard input and answers with one
JSON object on a line that begins with MARK, so that whatever a login shell prints around it does
no harm. Verbs that stream (`follow`, `read`, `build`) write bytes after that line and end with a
second marked line on standard error. Every verb can be repeated: a lost reply costs nothing.
"""
