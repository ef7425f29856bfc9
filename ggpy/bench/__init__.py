"""What `ggpy bench` is made of: ceilings, limits, tests, tables, the page of results, pictures.

The program itself is tools/bench.py. Importing this package costs nothing.
"""
