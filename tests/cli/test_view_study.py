"""`covey view STUDY`: its page shows the latest round, and sends commands that act while the study trains."""

import asyncio
import json
import shutil

import aiohttp
import pytest
from aiohttp import web

from covey.cli.view import command, study
from tests.support import studies

JSON = {"Content-Type": "application/json"}


def asked(kind, name, **rest):
    return json.dumps({"kind": kind, "name": name, "to": "", "changes": "", "fresh": False, **rest})


def answers(folder, *requests):
    """Status and body of requests: a path to get, or the body and headers of a command."""

    async def ask():
        runner = web.AppRunner(study.application(folder))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found = []
        async with aiohttp.ClientSession() as session:
            for one in requests:
                if isinstance(one, str):
                    response = await session.get(base + one)
                else:
                    response = await session.post(base + "/command", data=one[0], headers=one[1])
                found.append((response.status, await response.text()))
        await runner.cleanup()
        return found

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    studies.study(folder, {"a": {}, "b": {"learning_rate": 3e-2}}, max_steps=1).train()
    return folder


@pytest.mark.slow
def test_commands_of_the_page_act_after_the_step(tmp_path):
    made = studies.study(tmp_path, {"a": {}, "b": {}}, max_steps=4)
    play, said, drawn_before = made.play_round, [], []

    def play_round():
        if made.round == 1:
            wanted = "learning_rate=1e-3\n"
            drawn_before.append((tmp_path / "study.html").read_text())
            said.extend(
                answers(tmp_path, "/", (asked("stop", "a"), JSON), (asked("clone", "b", to="c", changes=wanted), JSON))
            )
        play()

    made.play_round = play_round
    variants = made.train()
    assert [status for status, _ in said] == [200, 200, 200] and "Study after round 1" in said[0][1]
    assert "Reward in training" in said[0][1]  # the curves of this very round, of which the folder's page has none
    assert "<svg" not in drawn_before[0]
    assert said[1][1] == "queued: it acts when the step of the next round ends"
    assert (variants["a"].status, variants["a"].step) == ("stopped", 2)
    assert variants["c"].parent == "b" and variants["c"].changes["learning_rate"] == 1e-3
    ((_, page),) = answers(tmp_path, "/")
    assert "<svg" in page and "&nbsp;&nbsp;c" in page and "<li>" in page


@pytest.mark.slow
def test_studies_of_earlier_releases_have_curves(trained, tmp_path):
    for name in ("study.md", "study.json"):
        shutil.copy(trained / name, tmp_path)
    assert study.live_page(tmp_path, []) == study.live_page(trained, [])
    assert "Reward in training" in study.live_page(tmp_path, [])


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (asked("stop", "z"), JSON, 400, "there is no variant 'z'; there are a, b"),
        (asked("halt", "a"), JSON, 400, "there is no command 'halt'"),
        (asked("change", "a", changes="learning_rate"), JSON, 400, "write field=value"),
        (asked("change", "a", changes="learning_rate=abc"), JSON, 400, "could not convert string to float"),
        (asked("change", "a", changes="learning_rate=["), JSON, 400, "'learning_rate=[' cannot be read"),
        (
            asked("change", "a", changes="learnig_rate=1"),
            JSON,
            400,
            "no setting of a variant. Did you mean `learning_rate`",
        ),
        (asked("clone", "a", to="b"), JSON, 400, "there is a variant 'b' already"),
        (asked("clone", "a", to="../b"), JSON, 400, "a variant cannot be called '../b'"),
        (asked("clone", "a", to="b|c"), JSON, 400, "a variant cannot be called 'b|c'"),
        ("[]", JSON, 400, ""),
        ("{", JSON, 400, ""),
        (asked("stop", "a"), {"Content-Type": "text/plain"}, 415, "JSON"),
        (asked("stop", "a"), {**JSON, "Origin": "http://evil.example"}, 403, "for the machine it runs on"),
        (asked("stop", "a"), {**JSON, "Host": "evil.example"}, 403, "for the machine it runs on"),
        (asked("stop", "a"), {**JSON, "Origin": "null"}, 403, "for the machine it runs on"),
    ],
)
def test_what_is_wrong_or_foreign_queues_nothing(trained, body, headers, status, says):
    ((found, text),) = answers(trained, (body, headers))
    assert found == status and says in text
    assert not list(trained.glob("commands/*"))


def test_the_page_of_a_study_that_has_ended_queues_nothing(trained):
    ((status, text),) = answers(trained, (asked("resume", "a", changes="max_steps=2"), JSON))
    assert status == 400 and "has ended, so nothing would carry out `resume a`" in text
    assert not list(trained.glob("commands/*"))


def test_variants_lead_to_the_pages_of_their_runs(trained):
    (_, page), (_, state), (status, text) = answers(trained, "/", "/runs/api/state", "/runs/")
    assert 'data-runs="[&quot;a&quot;, &quot;b&quot;]"' in page and "<form>" in page
    assert [run["name"] for run in json.loads(state)["runs"]] == ["a", "b"]
    assert status == 200 and "page.js" in text
    assert "<form" not in (trained / "study.html").read_text()  # the page to send has no controls


def test_names_are_text(tmp_path):
    (tmp_path / "study.md").write_text(
        "# Study after round 1\n\nvariant | status\n-|-\n<script>alert(1)</script> | x\n"
    )
    (tmp_path / "curves.json").write_text("[]")
    ((_, page),) = answers(tmp_path, "/")
    assert "&lt;script&gt;" in page and "alert(1)</script>" not in page


def test_a_study_is_shown_alone(trained):
    with pytest.raises(ValueError, match=r"is a study, which is shown alone; its page to send is study\.html"):
        command.main([str(trained), "--export", "x.html"])
    assert answers(trained / "a", "/")[0][0] == 404
