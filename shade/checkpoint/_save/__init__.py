"""One save after the copy: packed into chunks, hashed, encoded and written by threads."""
