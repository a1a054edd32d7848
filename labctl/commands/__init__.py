"""Command lines as values: ansible, rsync, ssh, systemd units, and the scripts that probe and lease
machines. Pure functions; nothing runs here.

May import: model, errors, shell and the layers below.
"""
