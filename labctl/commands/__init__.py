"""Command lines of ansible, rsync and ssh, systemd units, and scripts that probe and lease
machines. Pure functions; nothing runs here.

May import: model, errors, shell and the layers below.
"""
