"""The passes over a bucket that take time, each in numba and in numpy with the same results to the last bit."""
