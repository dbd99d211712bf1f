"""The walks over a bucket that cost something, each in several ways with the same result to the last bit."""
