"""The CPU backend: numba kernels over the blocks of the file; float32 where the file has it."""
