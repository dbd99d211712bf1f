"""The rows of `bench_gpu.py`: figures of a GPU beside their floor or rival, and paths that need one."""
