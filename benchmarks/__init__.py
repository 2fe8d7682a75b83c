"""Speed, as ratios within one run: machines differ and are noisy, so absolute times mean little."""
