"""What the commands do, as functions: rooms meet here, and nothing is printed."""
