"""Starting a run: checks, the mpirun line, and a watch so that no process is left behind."""
