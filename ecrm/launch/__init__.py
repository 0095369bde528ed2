"""Start a run: checks, the mpirun line, and a watch leaving no process behind."""
