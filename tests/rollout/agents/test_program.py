"""Programs as agents: started for each rollout, ended with it, whatever they do."""

import gc
import json
import os
import socket
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from covey.core.records import FinishReason
from covey.rollout.agents import AgentProgram, RemoteAgents, with_agent
from covey.rollout.agents.session import AgentSession
from covey.rollout.environments import EnvironmentWarning
from covey.rollout.environments.agent import REWARD, PlayedEnvironment
from covey.rollout.runner import RolloutSpec
from covey.rollout.user_functions import RolloutValidator
from covey.trainer.build_rollouts import check_rows
from tests.support.playing import TOKENIZER, play, says

ASK = """
import json, os, signal, subprocess, sys, time, urllib.error, urllib.request

GO = {"role": "user", "content": "go"}

def post(path, body, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return error.code

def connect(body=None, **options):
    import http.client  # a connection of its own, with a request on it whose reply nobody has read
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    if body is not None:
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **options.get("headers", {})}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection

def ask(content="go"):
    answer = post("/chat/completions", {"messages": [{"role": "user", "content": content}]})
    return answer if isinstance(answer, int) else answer["choices"][0]["message"]["content"]

"""


@pytest.fixture
def run(tmp_path):
    """Plays a program of this text, and gives its rollouts."""
    made = []

    def run(text, rows=None, seconds=20.0, group=1, room=400, **options):
        script = tmp_path / "agent.py"
        script.write_text(ASK + textwrap.dedent(text))
        agent = AgentProgram([sys.executable, str(script), "{row}"], **options)
        player = PlayedEnvironment(agent, seconds, RolloutValidator(len(TOKENIZER), None))
        made.append(player)
        rows = rows or [{"prompt": None, "question": "1+1"}]
        return play(player, says("1", "2"), rows=rows, group=group, room=room, seconds=seconds)

    yield run
    for player in made:
        endpoint = player._environment._service.endpoint
        assert soon(lambda endpoint=endpoint: endpoint._sessions == endpoint._busy == {})
        player.close()
        port = int(endpoint.url.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, AgentSession)] == []


def left(marker):
    """Processes whose command holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command and int(entry.name) != os.getpid():
                found.append(command)
    return found


def soon(condition):
    """True once it holds, within the grace that kills have."""
    until = time.monotonic() + 10
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def ended(marker):
    return soon(lambda: not left(marker))


def test_a_program_plays_and_gives_its_reward(run):
    (rollout,) = run("""
        row = json.load(sys.stdin)
        assert row == json.load(open(sys.argv[1])) == json.load(open(os.environ["COVEY_ROW"]))
        reply = ask(row["question"])
        os.write(int(os.environ["COVEY_REWARD_FD"]), str(float(reply == "1")).encode())
    """)
    assert rollout.error is None and rollout.extras == {REWARD: 1.0} and rollout.finish is FinishReason.STOP
    assert rollout.prompt == [{"role": "user", "content": "1+1"}] and rollout.completion[0]["content"] == "1"


ATTEMPTS = {
    "the name in its environment": 'eval "echo 9 > $COVEY_REWARD"; eval "echo 9 >&$COVEY_REWARD_FD"',
    "its parent's descriptor": "echo 9 > /proc/$PPID/fd/3",
    "an inherited descriptor": "echo 9 >&3",
    "many times": "for i in $(seq 2000); do echo 9 >&3; done",
    "a process that outlives its shell": "(sleep 0.2; echo 9 >&3) & sleep 0.4",
    "the endpoint, with the key of the session": 'curl -s -d 9 -H "x-api-key: $OPENAI_API_KEY" $OPENAI_BASE_URL/reward',
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel names senders on Linux")
@pytest.mark.parametrize("close_fds", [True, False])
def test_what_the_policy_runs_does_not_give_the_reward(run, close_fds):
    """Shell commands of a tool, that close the agent's descriptors or not: the agent's own reward counts."""
    text = f"""
        ask()
        command = {ATTEMPTS!r}[json.load(sys.stdin)["name"]]
        subprocess.run(["bash", "-c", command], close_fds={close_fds}, stderr=subprocess.DEVNULL)
        os.write(3, b"0.5")
        subprocess.run(["bash", "-c", command], close_fds={close_fds}, stderr=subprocess.DEVNULL)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EnvironmentWarning)
        rollouts = run(text, rows=[{"prompt": None, "name": name} for name in ATTEMPTS], seconds=60.0)
    found = {name: (one.error, one.extras.get(REWARD)) for name, one in zip(ATTEMPTS, rollouts, strict=True)}
    assert found == dict.fromkeys(ATTEMPTS, (None, 0.5))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel names senders on Linux")
def test_processes_from_before_the_first_reply_may_give_the_reward(run):
    """An agent that another program starts, such as a shell or `uv run`."""
    (rollout,) = run("""
        if len(sys.argv) == 2:
            sys.exit(subprocess.run([sys.executable, *sys.argv, "inner"], close_fds=False).returncode)
        ask()
        os.write(3, b"0.25")
    """)
    assert rollout.error is None and rollout.extras == {REWARD: 0.25}


def test_the_environment_is_cut_to_what_is_named(run, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "7")
    monkeypatch.setenv("MY_SETTING", "8")
    (rollout,) = run(
        'assert "MY_SECRET" not in os.environ; ask(os.environ["MY_SETTING"] + os.environ["HOME"][-4:])',
        environment=["MY_SETTING", "NOT_THERE"],
    )
    assert rollout.error is None and rollout.prompt[0]["content"].startswith("8")


def test_a_function_talks_to_the_url_itself():
    import aiohttp

    async def agent(row, base_url, api_key):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
            body = {"messages": [{"role": "user", "content": row["question"]}]}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                return float((await response.json())["choices"][0]["message"]["content"] == "1")

    player = PlayedEnvironment(AgentProgram(agent), 20.0, RolloutValidator(len(TOKENIZER), None))
    rollouts = play(player, says("1"), rows=[{"prompt": None, "question": str(i)} for i in range(3)], group=2)
    player.close()
    assert [one.extras[REWARD] for one in rollouts] == [1.0] * 6
    assert [one.prompt[0]["content"] for one in rollouts] == ["0", "0", "1", "1", "2", "2"]


HOSTILE = {
    "never connects": ("", "without a reply"),
    "hangs": ("ask(); time.sleep(100)", "took longer"),
    "hangs and ignores signals": (
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nask(); time.sleep(100)",
        "took longer",
    ),
    "continues asking": (
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: ask(); time.sleep(0.1)",
        "took longer",
    ),
    "kills itself": ("ask(); os.kill(os.getpid(), signal.SIGKILL)", "status 137"),
    "kills its group": ("ask(); os.killpg(0, signal.SIGKILL)", "failed"),
    "fails": ("ask(); raise ValueError('no idea')", "no idea"),
    "writes without end": ("ask()\nwhile True: os.write(2, b'x' * (1 << 20))", "more than 16 MiB"),
    "takes all memory": ("ask(); held = bytearray(1 << 30); time.sleep(9)", "0.25 GiB of memory"),
    "forks without end": ("ask()\nwhile True:\n  try: os.fork()\n  except OSError: pass", "processes"),
    "gives words as a reward": ("ask(); os.write(3, b'good')", "other than a number"),
    "gives a long text as a reward": ("ask(); os.write(3, b'1' * 200)", "other than a number"),
    "gives nan as a reward": ("ask(); os.write(3, b'nan')", "finite number"),
    "lets a tool give the reward": (
        "ask(); subprocess.run('echo 1 >&3', shell=True, close_fds=False)",
        "after the policy's first reply",
    ),
    "uses another key": ("assert post('/chat/completions', {'messages': []}, key='x') == 401", "without a reply"),
}

MARKER = f"covey-test-{os.getpid()}"
HARMLESS = {
    "leaves processes behind": f"""
        ask()
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)', {MARKER!r}], start_new_session=True)
    """,
    "leaves a session of its own behind": "ask()\nif os.fork() == 0: os.setsid(); time.sleep(100)",
    "sends nonsense": "[post('/chat/completions', b) for b in (b'', b'{', b'[]', b'\\xff' * 99, b'null')]; ask()",
    "sends what is no message": """
        for messages in (7, [7], [[]], [{}], None): post('/chat/completions', {'messages': messages})
        ask()""",
    "sends a huge body": """
        try: post('/chat/completions', b'x' * (40 << 20))
        except OSError: pass
        ask()""",
    "announces a huge body": """
        import socket
        host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
        s = socket.create_connection((host, int(port)))
        key = os.environ["OPENAI_API_KEY"]
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}"
        s.sendall((head + f"\\r\\nContent-Length: {1 << 30}\\r\\n\\r\\n").encode())
        ask()""",
    "sends a gigabyte": """
        import socket
        host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
        s = socket.create_connection((host, int(port)))
        head = f"POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nx-api-key: {os.environ['OPENAI_API_KEY']}\\r\\n"
        try:
            s.sendall((head + "Transfer-Encoding: chunked\\r\\n\\r\\n").encode())
            for _ in range(1 << 10): s.sendall(b"100000\\r\\n" + b"x" * (1 << 20) + b"\\r\\n")
        except OSError: pass
        ask()""",
    "asks for other paths": "[post(p, {}) for p in ('/files', '/../x', '/embeddings')]; ask()",
    "asks for what is too much": """
        post('/chat/completions', {'messages': [{'role': 'user', 'content': 'x'}], 'n': 9**9})
        ask()""",
    "does not speak HTTP": """
        import socket
        host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
        for data in (b'\\x00' * 1000, b'GET / HTTP/9\\r\\n\\r\\n', b'A' * 100_000):
            s = socket.create_connection((host, int(port))); s.sendall(data)
        ask()""",
    "asks and goes away": """
        import socket
        host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
        s = socket.create_connection((host, int(port)))
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
        key = os.environ["OPENAI_API_KEY"]
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}"
        s.sendall((head + f"\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n" + body).encode()); s.close()
        ask()""",
    "empties its folder": "ask(); [os.remove(one.path) for one in os.scandir(os.environ['TMPDIR'])]; time.sleep(0.1)",
    "names another model": "assert post('/chat/completions', {'model': 'gpt-9', 'messages': [GO]})['model'] == 'gpt-9'",
    "sends 10 MB that are read": "assert post('/chat/completions', {'messages': [GO], 'user': 'x' * (10 << 20)})['id']",
    "sends too many headers": """
        headers = {f"x-{i}": "y" * 999 for i in range(9999)}
        try: assert connect({"messages": [GO]}, headers=headers).getresponse().status == 400
        except OSError: pass
        ask()""",
    "never reads its streams": """
        held = [connect({"messages": [GO], "stream": True}) for _ in range(20)]
        ask()""",
    "holds connections without end": """
        held = [connect() for _ in range(200)]
        for one in held: one.connect()
        for _ in range(100):
            held[0].request("GET", "/v1/models")
            assert held[0].getresponse().read() and held[0].sock
        ask()""",
    "closes in the middle of a reply": """
        for _ in range(20):
            one = connect({"messages": [GO], "stream": True})
            one.sock.recv(10), one.close()
        ask()""",
    "leaves its key to others": """
        ask()
        open(os.path.dirname(sys.argv[0]) + "/key", "w").write(os.environ["OPENAI_API_KEY"])""",
    "uses the key of a rollout that has ended": """
        path = os.path.dirname(sys.argv[0]) + "/key"
        while not (os.path.exists(path) and (key := open(path).read())): time.sleep(0.05)
        while (status := post("/chat/completions", {}, key=key)) == 400: time.sleep(0.05)
        assert status == 401
        ask()""",
    "floods": "[ask(str(i % 100)) for i in range(150)]",
}


def dispatched(programs):
    """A program that does what its row names, or asks once."""
    texts = {name: textwrap.dedent(text) for name, text in programs.items()}
    return f"""
        PROGRAMS = json.loads({json.dumps(texts)!r})
        exec(PROGRAMS.get(json.load(sys.stdin)["name"], "ask()"))
    """


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are enforced on Linux")
@pytest.mark.parametrize("late", [False, True])
def test_hostile_programs_cost_their_own_rollouts_alone(run, late):
    """All at once, with two that behave."""
    chosen = {name: text for name, (text, reason) in HOSTILE.items() if (reason == "took longer") is late}
    rows = [{"prompt": None, "name": name} for name in ("good", *chosen, "also good")]
    limits = {"memory": 0.25, "processes": 12, "seconds": 6.0 if late else 60.0}
    good, *bad, also_good = run(dispatched(chosen), rows=rows, **limits)
    assert good.error is None and also_good.error is None and good.num_sampled == also_good.num_sampled == 2
    found = {name: one.error for name, one in zip(chosen, bad, strict=True)}
    assert {name: error for name, error in found.items() if HOSTILE[name][1] not in (error or "")} == {}
    assert ended("agent.py")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are enforced on Linux")
def test_what_a_program_sends_or_leaves_harms_nothing(run):
    rows = [{"prompt": None, "name": name} for name in HARMLESS]
    rollouts = run(dispatched(HARMLESS), rows=rows, seconds=60.0)
    assert {name: one.error for name, one in zip(HARMLESS, rollouts, strict=True) if one.error} == {}
    assert all(one.num_sampled >= 2 for one in rollouts)
    assert ended(MARKER) and ended("agent.py")


def test_a_program_that_fails_for_want_of_room_is_cut_off(run):
    """Each reply has two tokens; there is room for the first."""
    (rollout,) = run("ask('a'); assert ask('b') == '1'", room=2)
    assert rollout.error is None and rollout.finish is FinishReason.LENGTH and rollout.num_sampled == 2
    assert rollout.extras == {REWARD: None}


def test_programs_of_a_group_have_sessions_of_their_own(run):
    rollouts = run("ask(str(os.getpid())); ask(os.environ['OPENAI_API_KEY'])", group=6)
    assert len({one.completion[1]["content"] for one in rollouts}) == 6
    assert all(one.num_sampled == 4 and len(one.strands) == 1 for one in rollouts)


def test_what_is_no_agent_is_refused():
    with pytest.raises(ValueError, match="there is no such program"):
        AgentProgram("no-such-program --now")
    with pytest.raises(ValueError, match="not async"):
        AgentProgram(lambda row, base_url, api_key: None)
    with pytest.raises(ValueError, match="`tools` would not be used"):
        with_agent("python", None, tools=[print])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": None, "image": "x.png"},
        {"prompt": "?", "images": ["x.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
    ],
)
def test_images_are_refused_for_programs(row):
    """Programs get their row as JSON and ask in text: the policy would not see them."""
    validator = RolloutValidator(len(TOKENIZER), None)
    for agent in (AgentProgram(sys.executable), RemoteAgents(0, key="x" * 16)):
        spec = RolloutSpec(PlayedEnvironment(agent, 20.0, validator), None, 20.0)
        assert not [*check_rows(spec, [{"prompt": None, "image": None, "images": []}], "train_dataset")]
        (found,) = check_rows(spec, [{"prompt": "?"}, row], "eval_dataset")
        assert found.code == "prompt-images"
        assert "row 1 of `eval_dataset`" in found.evidence


@pytest.mark.slow
def test_a_trainer_learns_through_a_program(tmp_path):
    """The example, with a tiny model for two steps: strands, rewards and gradients of a real run."""
    import runpy

    from tests.support import tiny

    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "agents" / "train.py"))
    model = tiny.model(scale=3.0, max_position_embeddings=1024)
    settings = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 64}
    quiet = {"report_to": "none", "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    trainer = example["main"](str(tmp_path / "model"), output_dir=str(tmp_path / "run"), **settings, **quiet)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(entry["rollouts/failed"] == 0 for entry in logs)
    assert trainer.rewards.names == ["environment"] and json.dumps(logs)
