"""GGUF files in another type: mixes, quantising on all cores, importance matrices, SmoothQuant."""
