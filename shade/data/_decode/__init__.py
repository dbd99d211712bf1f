"""Decodes JPEG files to pixels, and holds the format in which decoded pictures lie in the cache."""
