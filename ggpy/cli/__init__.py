"""The command line of `ggpy run`: the only readers of its options."""
