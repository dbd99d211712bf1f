"""Lightning's checkpoints as snapshots, of a whole model and of one that is split, and its DataModule."""
