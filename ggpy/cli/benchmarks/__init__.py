"""The command lines of `ggpy bench`, `ggpy compare` and `ggpy bench_serve`."""
