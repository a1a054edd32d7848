"""The HTTP server of `labctl serve`, which runs in a container on the server.

It is sent there as files and imports nothing of labctl but `wire`. The project that trained the
model defines how it is loaded (project.py). All input from clients is limited here.
"""
