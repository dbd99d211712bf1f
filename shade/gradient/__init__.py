"""Gradients across a slow link: choose what matters, keep the rest for later, send, merge, apply.

One file a compressor or a quantiser; importing this room registers them all.
"""
