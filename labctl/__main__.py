"""`python -m labctl`."""

from labctl.cli import main

main()
