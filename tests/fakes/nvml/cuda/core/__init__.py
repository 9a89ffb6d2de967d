"""The stand-in for cuda.core: only its module `system`."""
