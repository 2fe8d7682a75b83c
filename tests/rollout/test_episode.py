"""Episodes: token-exact conversations that grow, with room, seeds and forks."""

import asyncio
import json

import pytest

from covey.core.engine import SamplingParams
from covey.core.records import Completion, FinishReason
from covey.rollout.episode import EpisodeEngine
from covey.rollout.prompts import PromptCodec, sample_seed
from covey.rollout.tools.turn_template import TurnTemplates
from tests.support import tiny

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
KEY = (7, "train", 0, 3, 1)
QUESTION = [{"role": "user", "content": "2+2="}]


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def rendered(messages, answer=False):
    return TOKENIZER.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)


class Says:
    """Answers with the given texts in turn, each ended by the end of sequence unless it does not fit."""

    def __init__(self, *texts, reports=True):
        self.texts = list(texts)
        self.requests = []
        self.reports = reports

    async def __call__(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.texts[min(self.requests.index(request) + 1, len(self.texts)) - 1]
        ids = [*tokens(text), EOS][: request.params.max_tokens]
        finish = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
        count = len(ids)
        if not self.reports:
            return [Completion(list(ids), None, finish) for _ in request.seeds]
        return [
            Completion(
                list(ids), [-0.5] * count, finish, [0.25] * count, versions=[self.requests.index(request) + 1] * count
            )
            for _ in request.seeds
        ]


def engine(ask, prompt=QUESTION, max_tokens=100, context=None, tokenizer=TOKENIZER, **row):
    templates = TurnTemplates(PromptCodec(tokenizer, None, context), [EOS])
    return EpisodeEngine(ask, templates, SamplingParams(max_tokens), KEY, {"prompt": prompt, **row}, KEY[-1])


def play(coroutine):
    return asyncio.run(coroutine)


async def talk(episode, *said):
    """A turn of the policy, and one more after each thing that is said to it."""
    await episode.sample()
    for text in said:
        assert episode.write(text)
        await episode.sample()
    return episode.done()


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_conversation_is_the_one_that_the_template_renders():
    rollout = play(talk(engine(Says("5", "4", "four")).begin(), "Really?", "In words?"))
    said = [("assistant", "5"), ("user", "Really?"), ("assistant", "4"), ("user", "In words?"), ("assistant", "four")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert rollout.completion == messages
    assert rollout.prompt_ids == rendered(QUESTION, answer=True)
    assert rollout.prompt_ids + rollout.completion_ids == rendered([*QUESTION, *messages])


def test_sampled_tokens_and_ends_of_turns_are_marked():
    rollout = play(talk(engine(Says("5", "4")).begin(), "No."))
    told = len(tokens("<bos>user: No.<eos><bos>assistant: "))
    assert rollout.sampled == [True] * 2 + [False] * told + [True] * 2
    assert rollout.turn_ends == [1, 1 + told + 2]
    assert rollout.logprobs == [-0.5] * 2 + [0.0] * told + [-0.5] * 2
    assert rollout.entropies == [0.25] * 2 + [0.0] * told + [0.25] * 2
    assert rollout.versions == [1] * 2 + [1] * told + [2] * 2
    assert rollout.finish is FinishReason.STOP and rollout.num_turns == 2


def test_write_accepts_one_message_or_several():
    messages = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "7"}]
    one, several = engine(Says("x")).begin(), engine(Says("x")).begin()
    play(talk(one, messages[0])), play(talk(several, messages))
    assert TOKENIZER.decode(one.completion_ids) == "x<eos><bos>tool: 6<eos><bos>assistant: x<eos>"
    assert TOKENIZER.decode(several.completion_ids) == (
        "x<eos><bos>tool: 6<eos><bos>tool: 7<eos><bos>assistant: x<eos>"
    )


def test_text_follows_a_string_prompt_unchanged():
    rollout = play(talk(engine(Says("4", "9"), prompt="2+2=").begin(), " 3*3="))
    assert rollout.prompt_ids == tokens("2+2=")
    assert TOKENIZER.decode(rollout.completion_ids) == "4<eos> 3*3=9<eos>"
    assert rollout.completion == "4 3*3=9"


def test_a_message_that_the_assistant_has_begun_is_continued():
    begun = [*QUESTION, {"role": "assistant", "content": "It is "}]
    rollout = play(talk(engine(Says("5", "4"), prompt=begun).begin(), "No."))
    assert [message["content"] for message in rollout.completion] == ["It is 5", "No.", "4"]
    assert rollout.prompt_ids == TOKENIZER.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert rollout.prompt_ids + rollout.completion_ids == rendered([*QUESTION, *rollout.completion])


def test_an_episode_can_have_its_own_prompt_and_tools():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + tokenizer.chat_template
    playing = engine(Says("4"), tokenizer=tokenizer)
    tools = [{"type": "function", "function": {"name": "add"}}]
    episode = playing.begin("2*2="), playing.begin([{"role": "system", "content": "Be brief."}, *QUESTION], tools)
    assert episode[0].prompt_ids == tokens("2*2=")
    assert TOKENIZER.decode(episode[1].prompt_ids).startswith("add;<bos>system: Be brief.<eos><bos>user: 2+2=")
    assert playing.episodes == list(episode)


def test_template_arguments_of_a_row_apply_to_every_turn():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<bos>assistant: ", "<bos>assistant: {{ mood or '' }}")
    playing = engine(Says("4"), tokenizer=tokenizer, chat_template_kwargs={"mood": ":) "})
    playing.templates._unstable = "keep"  # a turn of the past is without its mood
    rollout = play(talk(playing.begin(), "Sure?"))
    assert TOKENIZER.decode(rollout.prompt_ids).endswith("<bos>assistant: :) ")
    assert TOKENIZER.decode(rollout.completion_ids) == "4<eos><bos>user: Sure?<eos><bos>assistant: :) 4<eos>"


def test_values_that_an_engine_does_not_report_are_none():
    rollout = play(talk(engine(Says("5", "4", reports=False)).begin(), "No."))
    assert (rollout.logprobs, rollout.entropies, rollout.versions) == (None, None, None)


def test_fields_given_at_the_end_are_extras():
    async def rollout():
        episode = engine(Says("5")).begin()
        await episode.sample()
        return episode.done(tries=2), episode.done(FinishReason.TOOL_BUDGET)

    first, second = play(rollout())
    assert first.extras == {"tries": 2} and first.finish is FinishReason.STOP
    assert second.finish is FinishReason.TOOL_BUDGET and first.completion_ids is not second.completion_ids


# ---- room ------------------------------------------------------------------------------------------------------------


def test_a_turn_without_an_end_is_cut_off_where_the_room_ends():
    async def rollout():
        episode = engine(Says("123456"), max_tokens=4).begin()
        reply = await episode.sample()
        assert (reply.text, reply.finish, episode.room) == ("1234", FinishReason.LENGTH, 0)
        assert episode.write("Go on.") is False
        with pytest.raises(ValueError, match=r"has ended \(length\).*look at `episode.finish`"):
            await episode.sample()
        return episode.done()

    rollout = play(rollout())
    assert rollout.finish is FinishReason.LENGTH and rollout.completion_ids == tokens("1234")


def test_room_is_for_all_turns_together():
    told = len(tokens("<bos>user: No.<eos><bos>assistant: "))
    asked = Says("5", "123456789")

    async def rollout():
        episode = engine(asked, max_tokens=2 + told + 3).begin()
        await episode.sample()
        assert episode.room == told + 3 and episode.write("No.") and episode.room == 3
        await episode.sample()
        return episode.done()

    rollout = play(rollout())
    assert [request.params.max_tokens for request in asked.requests] == [2 + told + 3, 3]
    assert rollout.completion[-1]["content"] == "123" and rollout.finish is FinishReason.LENGTH


@pytest.mark.parametrize(("spare", "written"), [(1, True), (0, False)])
def test_messages_that_leave_no_room_to_answer_are_not_written(spare, written):
    told = len(tokens("<bos>user: No.<eos><bos>assistant: "))

    async def rollout():
        episode = engine(Says("5", "4"), max_tokens=2 + told + spare).begin()
        await episode.sample()
        assert episode.write("No.") is written
        assert episode.finish is (None if written else FinishReason.LENGTH)
        return episode.done()

    assert len(play(rollout()).completion_ids) == 2 + written * told


def test_text_far_beyond_the_room_is_not_encoded(monkeypatch):
    async def rollout():
        episode = engine(Says("5", "4"), max_tokens=50).begin()
        await episode.sample()
        monkeypatch.setattr(type(episode), "_encode_messages", None)
        assert not episode.write("x" * (256 * 50)) and episode.finish is FinishReason.LENGTH
        return episode.done()

    assert len(play(rollout()).completion_ids) == 2


def test_the_context_bounds_prompt_and_completion_together():
    episode = engine(Says("123456"), context=len(rendered(QUESTION, answer=True)) + 3).begin()
    reply = play(episode.sample())
    assert reply.text == "123" and episode.finish is FinishReason.LENGTH


def test_a_turn_that_ends_with_the_room_is_whole():
    async def rollout():
        episode = engine(Says("5"), max_tokens=2).begin()
        reply = await episode.sample()
        assert reply.finish is FinishReason.STOP and episode.finish is None
        return episode.done(), episode

    rollout, episode = play(rollout())
    assert rollout.finish is FinishReason.STOP
    assert play(episode.sample()).token_ids == [] and episode.finish is FinishReason.LENGTH


# ---- turns with a limit of their own ---------------------------------------------------------------------------------


def test_a_turn_that_max_tokens_cut_off_can_be_continued():
    asked = Says("12", "34", "5")

    async def rollout():
        episode = engine(asked).begin()
        first = await episode.sample(max_tokens=2)
        assert (first.text, first.finish, episode.finish) == ("12", FinishReason.LENGTH, None)
        assert episode.done().finish is FinishReason.LENGTH, "were it left like that"
        second = await episode.sample(max_tokens=2)
        third = await episode.sample()
        assert (second.text, third.text, third.finish) == ("34", "5", FinishReason.STOP)
        return episode.done()

    rollout = play(rollout())
    assert rollout.completion == [{"role": "assistant", "content": "12345"}]
    assert rollout.completion_ids == [*tokens("12345"), EOS] and all(rollout.sampled)
    assert rollout.turn_ends == [5] and rollout.finish is FinishReason.STOP
    assert len({request.seeds[0] for request in asked.requests}) == 3


def test_a_turn_may_be_context_alone():
    """The draft "5<eos>" is read and kept in the messages, and only "4<eos>" is trained on."""

    async def run():
        episode = engine(Says("5", "4")).begin()
        await episode.sample(train=False)
        episode.write("Really?")
        await episode.sample()
        return episode.done()

    rollout = play(run())
    trained = [token for token, sampled in zip(rollout.completion_ids, rollout.sampled, strict=True) if sampled]
    assert trained == [*tokens("4"), EOS] and len(rollout.turn_ends) == 2
    assert rollout.completion_ids[:2] == [*tokens("5"), EOS] and rollout.completion[0]["content"] == "5"


def test_turns_have_a_limit_of_their_own():
    """At most 3 tokens each: the first is cut off and ended, the second ends itself."""
    limited = engine(Says("12345", "67"), max_tokens=60)
    limited.max_turn_length = 3

    async def run():
        episode = limited.begin()
        first = await episode.sample()
        assert episode.write("on")
        return first, await episode.sample(max_tokens=50), episode.done()

    first, second, rollout = play(run())
    assert (first.text, first.finish, second.text, second.finish) == ("123", "length", "67", "stop")
    assert rollout.num_sampled == 6 and rollout.finish is FinishReason.STOP


def test_write_ends_a_turn_that_max_tokens_cut_off():
    async def rollout():
        episode = engine(Says("12345", "4")).begin()
        await episode.sample(max_tokens=2)
        assert episode.write("Stop.")
        await episode.sample()
        return episode.done()

    rollout = play(rollout())
    said = [("assistant", "12"), ("user", "Stop."), ("assistant", "4")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert rollout.completion == messages and rollout.turn_ends == [1, len(rollout.completion_ids) - 1]
    assert rollout.prompt_ids + rollout.completion_ids == rendered([*QUESTION, *messages])
    assert rollout.sampled[:3] == [True, True, False]  # the policy has not chosen to end its turn


@pytest.mark.parametrize("said", ["call", ""])
def test_write_ends_a_turn_that_a_stop_text_cut_off(said):
    """Servers can be told to stop at a text: the token that ends the turn is missing then."""

    async def stops(request):
        return [Completion(tokens(said), None, FinishReason.STOP)]

    async def write():
        episode = engine(stops).begin()
        await episode.sample()
        assert episode.write("More.") and episode.finish is None
        return episode.done()

    rollout = play(write())
    assert rollout.prompt_ids + rollout.completion_ids == rendered(
        [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "More."}], answer=True
    )
    assert rollout.num_sampled == len(tokens(said))


def test_a_limit_beyond_the_room_is_the_room():
    episode = engine(Says("123456"), max_tokens=4).begin()
    assert play(episode.sample(max_tokens=4)).text == "1234" and episode.finish is FinishReason.LENGTH


# ---- seeds and forks -------------------------------------------------------------------------------------------------


class Seeds:
    """Answers with two tokens that the seed decides."""

    async def __call__(self, request):
        return [
            Completion([4 + seed % 90, EOS], [0.0, 0.0], FinishReason.STOP, versions=[0, 0]) for seed in request.seeds
        ]


def test_the_first_turn_is_what_a_plain_completion_would_be():
    rollout = play(talk(engine(Seeds()).begin()))
    assert rollout.completion_ids[0] == 4 + sample_seed(*KEY) % 90


def test_turns_episodes_forks_and_generate_have_own_seeds():
    async def seeds():
        said = Says("x")
        playing = engine(said)
        first, second = playing.begin(), playing.begin()
        for episode in (first, second):
            await episode.sample()
            episode.write("?")
            await episode.sample()
        for fork in (first.fork(), first.fork()):
            fork.write("?")
            await fork.sample()
            deeper = fork.fork()
            deeper.write("?")
            await deeper.sample()
        await playing.generate("x", n=2)
        await playing.generate("x")
        return [seed for request in said.requests for seed in request.seeds]

    first, second = play(seeds()), play(seeds())
    assert first == second
    assert len(set(first)) == len(first) == 2 + 2 + 2 + 2 + 3


def test_a_fork_begins_alike_and_goes_on_alone():
    async def rollouts():
        episode = engine(Says("5", "6", "7")).begin()
        await episode.sample()
        fork = episode.fork()
        fork.write("Left?"), episode.write("Right?")
        await fork.sample()
        await episode.sample()
        fork.messages[0]["content"] = "mine"
        return episode.done(), fork.done()

    stem, fork = play(rollouts())
    assert [message["content"] for message in stem.completion] == ["5", "Right?", "7"]
    assert [message["content"] for message in fork.completion] == ["mine", "Left?", "6"]
    assert stem.prompt_ids == fork.prompt_ids and stem.completion_ids[:2] == fork.completion_ids[:2]


def test_a_fork_in_the_middle_of_a_turn_goes_on_with_it():
    async def rollouts():
        episode = engine(Says("12", "34", "56")).begin()
        await episode.sample(max_tokens=2)
        forks = [episode.fork(), episode.fork()]
        for fork in forks:
            await fork.sample()
        return [fork.done() for fork in forks]

    left, right = play(rollouts())
    assert [left.completion[0]["content"], right.completion[0]["content"]] == ["1234", "1256"]
    assert left.turn_ends == right.turn_ends == [4]


# ---- replies that nobody trains on -----------------------------------------------------------------------------------


def test_generate_leaves_the_episode_unchanged():
    async def rollout():
        asked = Says("yes")
        playing = engine(asked)
        episode = playing.begin()
        replies = await playing.generate("Is it?", n=2, max_tokens=9, temperature=0.0)
        assert [reply.text for reply in replies] == ["yes", "yes"]
        assert asked.requests[0].prompt_ids == tokens("Is it?")
        assert (asked.requests[0].n, asked.requests[0].params) == (2, SamplingParams(9, temperature=0.0))
        return episode.done()

    assert play(rollout()).completion_ids == []


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 1.5}, {"max_tokens": 0}, {"temperature": -1.0}])
def test_invalid_arguments_of_generate_are_no_engine_failure(wrong):
    playing = engine(Says("x"))
    with pytest.raises(ValueError, match=next(iter(wrong))):
        play(playing.generate("?", **wrong))
    assert playing.failure is None


def test_an_exception_of_the_engine_is_noted_as_its_failure():
    async def broken(request):
        raise RuntimeError("no weights")

    playing = engine(broken)
    with pytest.raises(RuntimeError, match="no weights"):
        play(playing.begin().sample())
    assert str(playing.failure) == "no weights"


# ---- what cannot be said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "said", "error"),
    [
        ("2+2=", QUESTION, "after a prompt that is a string, write a string"),
        (QUESTION, [], "nothing to write"),
        (QUESTION, [{"role": "user", "content": [{"type": "image"}]}], "must be text"),
    ],
)
def test_messages_that_cannot_follow_are_refused(prompt, said, error):
    async def rollout():
        episode = engine(Says("5"), prompt=prompt).begin()
        await episode.sample()
        episode.write(said)

    with pytest.raises(ValueError, match=error):
        play(rollout())


def test_messages_follow_a_turn_of_the_policy():
    async def twice():
        episode = engine(Says("5")).begin()
        await episode.sample()
        episode.write("No.")
        episode.write("Really.")

    with pytest.raises(ValueError, match=r"there is none yet.*`engine.begin\(prompt\)`"):
        engine(Says("5")).begin().write("Hello.")
    with pytest.raises(ValueError, match="into one `write`"):
        play(twice())


def test_concurrent_sampling_of_an_episode_is_refused():
    async def both():
        episode = engine(Says("5")).begin()
        await asyncio.gather(episode.sample(), episode.sample())

    with pytest.raises(ValueError, match=r"`fork\(\)` the episode for every branch"):
        play(both())


def test_templates_are_cached_by_tools_and_arguments():
    templates = TurnTemplates(PromptCodec(TOKENIZER, None, None), [EOS])
    one = templates.of([], {"mood": "x"})
    assert templates.of([], {"mood": "x"}) is one and templates.of([], None) is not one
    assert json.loads(next(iter(templates._cache))) == [[], {"mood": "x"}]


def test_the_turns_of_an_opponent_are_not_trained():
    """An episode of a seat holds no token that the policy sampled, and no log-prob of the other policy."""

    class Other:
        async def generate(self, request):
            return [Completion([7, 8], [-1.0, -2.0], FinishReason.STOP)]

    made = engine(Says("x"))
    made.seats = {"other": Other()}
    assert made.seat("other") is made.seat("other") is not made.seat("other", game=1)
    episode = made.seat("other").begin("a")
    asyncio.run(episode.sample())
    rollout = episode.done()
    assert (rollout.completion_ids, rollout.sampled, rollout.logprobs) == ([7, 8], [False, False], [0.0, 0.0])
    made.closed = True
    with pytest.raises(ValueError, match="has ended"):
        asyncio.run(made.seat("other").begin("b").sample())
