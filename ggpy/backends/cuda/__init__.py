"""The CUDA backend: the ops of interface.Ops on one GPU."""
