"""Runs, services and images on the server, as containers of its Docker Engine."""
