"""In the place of mpi4py, for the worker processes alone: so that they bear the name of the real ones."""
