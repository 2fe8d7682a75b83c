"""Page of a run or a study: read from records, served by `covey view` and written as one file."""
