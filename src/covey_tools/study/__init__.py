"""Many configurations over one frozen model, trained side by side in one process."""
