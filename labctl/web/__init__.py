"""The instructor's dashboard of a course, on the loopback, and the page for its students.

`labctl.web.http_server.serve_dashboard` starts it. It needs the extra `labctl[web]`.

May import: courses and the layers below.
"""
