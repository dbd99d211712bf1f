"""MixtureSampler and PackedDataset: token data sets mixed by share of tokens, packed before ranks are dealt."""
