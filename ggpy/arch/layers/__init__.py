"""Kinds of layers: each is one module, with its tensors, its settings, and how it is built.

A module here knows the names of its tensors below "blk.N." and nothing of other kinds.
"""
