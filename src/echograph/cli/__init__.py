"""The commands; the one place where rooms meet."""
