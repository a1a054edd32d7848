"""What runs on the server: one program, standard library only, Python 3.8 or newer.

`python3 __main__.py VERB` reads one JSON object (a line) on standard input and answers with one
JSON object on a line that begins with MARK, so that whatever a login shell prints around it does
no harm. Verbs that stream (`follow`, `read`, `build`) write bytes after that line and end with a
second marked line on standard error. Every verb can be repeated: a lost reply costs nothing.
"""
