"""One rank of a run, for any kind of training: meeting the other ranks, and counting."""
