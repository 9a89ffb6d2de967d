"""Stands in for mpi4py in the worker processes, so that they have the command line of the real ones."""
