"""The passes over a bucket that take time, compiled by numba, with the same results to the last bit everywhere."""
