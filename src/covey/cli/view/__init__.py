"""`covey view`: a page on recorded runs, served on this machine or written to a file."""
