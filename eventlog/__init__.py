"""eventlog records and keeps: what every process saw, in files that survive it."""
