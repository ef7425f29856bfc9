"""How well a model predicts, and models of random weights."""
