"""Mixtures of experts by kernels: the router, the chosen experts' products, and their sum."""
