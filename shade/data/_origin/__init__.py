"""Reads bytes of the data set's origin: files of a mounted file system, or what lies behind a URL."""
