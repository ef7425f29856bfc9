"""Perplexity and KL divergence of models, and synthetic models of random weights."""
