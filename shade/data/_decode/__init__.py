"""Decodes JPEG files to pixels, and packs pictures for the cache."""
