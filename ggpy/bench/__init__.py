"""The parts of `ggpy bench`: ceilings, limits, tests, tables, the page of results, plots.

The program is tools/bench.py. Importing this package imports nothing else.
"""
