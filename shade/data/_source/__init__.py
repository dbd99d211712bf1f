"""Where the samples of a data set come from: its items, its files, or what it brings itself."""
