"""Starting a run: the mpirun line, the checks before it, and watching over it so that nothing is left behind."""
