"""Being stopped, stalled or killed: signals, the watchdog and exit codes."""
