"""A page for operators: its files, and the state of the server that it shows."""
