"""Optimizers that apply a few chosen elements at a time, on the CPU; public names in `shade.gradient.optim`."""
