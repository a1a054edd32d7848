"""The instructor's dashboard of a course: server-rendered pages on this machine's loopback.

`labctl.web.http_server.run` starts it. It needs the extra `labctl[web]`.
"""
