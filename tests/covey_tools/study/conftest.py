import pytest


@pytest.fixture(autouse=True)
def without_pages(request, monkeypatch):
    if request.node.get_closest_marker("pages"):
        return
    monkeypatch.setattr("covey.trainer.integrations.report.RunReport.write", lambda self: None)
