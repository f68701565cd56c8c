"""The process shell the services share; it knows no tokens."""
