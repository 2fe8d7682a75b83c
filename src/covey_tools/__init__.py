"""Tools that look at runs: page, doctor, differences, replays, studies, files to begin with; training imports none."""
