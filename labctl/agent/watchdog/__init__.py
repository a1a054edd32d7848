"""The watchdog: saves results and ends the server at its deadline or budget, or when it is idle."""
