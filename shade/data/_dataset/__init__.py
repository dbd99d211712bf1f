"""ShadeDataset: how its samples are read, decoded, cached and transformed."""
