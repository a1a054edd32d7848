"""Create the servers of a lab that has several: all of them in one zone, or none.

They talk to one another at every step, which is slow and costs money between zones. A part of them
is of no use, and costs money.
"""

from __future__ import annotations
