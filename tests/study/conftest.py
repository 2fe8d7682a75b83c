import pytest


@pytest.fixture(autouse=True)
def without_pages(request, monkeypatch):
    if request.node.get_closest_marker("pages"):
        return
    monkeypatch.setattr("covey.trainer.integrations.report.RunReport.write", lambda self, **own: None)
    monkeypatch.setattr("covey.study.report.figures", lambda *drawn: "")
    monkeypatch.setattr("covey.study.report.draw_panel", lambda *drawn: "")
    monkeypatch.setattr("covey.study.report.as_svg", lambda drawn: "")
