"""Steps on their way to the GPU: padded, uploaded, recorded as graphs."""
