"""Tools that look at runs: page, differences, replays, studies, files to begin with. Training imports none of them."""
