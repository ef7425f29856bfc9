"""Files in another type: mixes, blocks on all cores, importance, SmoothQuant."""
