"""The instructor's dashboard of a course: server-rendered pages on this machine's loopback.

`labctl.web.http_server.serve_dashboard` starts it. It needs the extra `labctl[web]`.

May import: courses and the layers below.
"""
