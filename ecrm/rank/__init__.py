"""One rank of a run, whatever is trained: how it finds the others, and what it counts."""
