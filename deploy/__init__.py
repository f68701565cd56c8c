"""Places the services: plain processes, one process, or Ray."""
