"""The mirror: sends the results of runs to the lab's store, and restores runs from there."""
