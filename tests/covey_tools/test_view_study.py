"""`covey view STUDY`: its page shows the latest round, and sends commands that act while the study trains."""

import asyncio
import base64
import gzip
import json
import re

import aiohttp
import pytest
from aiohttp import web

from covey_tools.study.page import page_of
from covey_tools.view import command, study
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
                    response = await session.post(base + "/api/command", data=one[0], headers=one[1])
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
    play, said = made.play_round, []

    def play_round():
        if made.round == 1:
            clone = asked("clone", "b", to="c", changes="learning_rate=1e-3\n")
            said.extend(answers(tmp_path, "/api/state", (asked("stop", "a"), JSON), (clone, JSON)))
        play()

    made.play_round = play_round
    variants = made.train()
    assert [status for status, _ in said] == [200, 200, 200]
    shown = json.loads(said[0][1])["study"]
    assert shown["title"] == "Study after round 1" and shown["takes_commands"]
    assert "Reward in training" in [chart["title"] for chart in shown["curves"]]
    assert said[1][1] == "queued: it acts when the step of the next round ends"
    assert (variants["a"].status, variants["a"].step) == ("stopped", 2)
    assert variants["c"].parent == "b" and variants["c"].changes["learning_rate"] == 1e-3
    ((_, state),) = answers(tmp_path, "/api/state")
    shown = json.loads(state)["study"]
    assert "&nbsp;&nbsp;c" in [row[0] for row in shown["rows"]] and shown["history"]


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
    ((_, state),) = answers(trained, "/api/state")
    found = json.loads(state)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert [row[0] for row in found["study"]["rows"]] == ["a", "b"]


def test_the_page_to_send_has_all_variants_and_takes_no_commands(trained, tmp_path):
    assert command.main([str(trained), "--export", str(tmp_path / "study.html")]) == 0
    for page in (tmp_path / "study.html", trained / "report.html"):
        data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
        state = json.loads(gzip.decompress(base64.b64decode(data["state"])))
        assert [run["name"] for run in state["runs"]] == ["a", "b"] and "run/1" in data
        assert "takes_commands" not in state["study"] and state["study"]["rows"][0][0] == "a"


def test_names_are_text(tmp_path):
    (tmp_path / "study.md").write_text(
        "# Study after round 1\n\nvariant | status\n-|-\n<script>alert(1)</script> | x\n"
    )
    assert page_of(tmp_path)["rows"] == [["<script>alert(1)</script>", "x"]] and page_of(tmp_path)["curves"] == []


def test_a_study_is_shown_alone(trained):
    with pytest.raises(ValueError, match="is a study, which is shown alone"):
        command.main([str(trained), str(trained / "a")])
