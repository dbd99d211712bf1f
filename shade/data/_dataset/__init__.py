"""ShadeDataset and the sources of its samples."""
