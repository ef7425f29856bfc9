"""The CPU backend: numba kernels that read the blocks of the file."""
