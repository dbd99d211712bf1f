"""What a training script touches: `ShadeSampler` draws and steers, `ShadeDataset` fetches and decodes.

Read `sampler`, then `steering` (what it tells the cache); `dataset`, then `source` (where samples come from) and
`codec` (items to bytes without pickle).
"""
