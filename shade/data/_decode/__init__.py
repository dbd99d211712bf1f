"""JPEG files to pixels."""
