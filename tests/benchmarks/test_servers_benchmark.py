"""Command line of the benchmark of servers."""

import pytest

from benchmarks import servers


def test_differences_of_no_update_are_refused_before_a_server_starts(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["servers", "--part", "differences", "--updates", "0"])
    with pytest.raises(SystemExit):
        servers.main()
    assert "--updates 0: must be at least 1" in capsys.readouterr().err
