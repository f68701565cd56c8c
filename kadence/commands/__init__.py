"""The commands of the command line that need nothing but the SDK."""
