"""ShadeLoader: a pipeline of threads in place of the DataLoader's processes."""
