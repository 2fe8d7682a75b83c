"""Settings of inference servers: addresses in every way of writing them, keys that stay secret, settings passed on."""

import json

import pytest

from covey.cli.config_file import load_run
from covey.core.findings import CheckError
from covey.trainer.engines.servers import generation_extras, listed, pool_file_of
from tests.support import runs

SERVER = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("settings", "urls"),
    [
        ({}, ["http://127.0.0.1:8000"]),
        ({"vllm_server_host": "node3", "vllm_server_port": 9}, ["http://node3:9"]),
        ({"vllm_server_host": "::1"}, ["http://[::1]:8000"]),
        ({"vllm_server_base_url": "http://a:1/"}, ["http://a:1"]),
        ({"vllm_server_base_url": "http://a:1, https://b:2"}, ["http://a:1", "https://b:2"]),
        ({"vllm_server_base_url": ["http://a:1", "http://b:2"]}, ["http://a:1", "http://b:2"]),
    ],
)
def test_servers_are_given_by_host_and_port_or_by_urls(tmp_path, settings, urls):
    assert runs.config(tmp_path, **SERVER, **settings).vllm_urls == urls


@pytest.mark.parametrize("given", ["localhost:8000", "http://a:1/v1", ["http://a:1", "b"], "ftp://a"])
def test_what_is_no_url_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match=r"is not the URL of a server. Write http://HOST:PORT"):
        runs.config(tmp_path, **SERVER, vllm_server_base_url=given)


def test_a_server_named_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="names http://a:1 twice"):
        runs.config(tmp_path, **SERVER, vllm_server_base_url="http://a:1,http://a:1/")


@pytest.mark.parametrize("urls", [["http://a:1", "http://b:2"], "http://a:1,http://b:2"])
def test_run_files_and_flags_take_several_servers(tmp_path, urls):
    file = tmp_path / "run.json"
    run = {"output_dir": str(tmp_path), "vllm_server_base_url": urls, "bf16": False, **runs.DEFAULTS, **SERVER}
    file.write_text(json.dumps(run))
    assert load_run(file).args.vllm_urls == ["http://a:1", "http://b:2"]
    flags = ["--vllm_server_base_url", "http://c:1,http://d:2"]
    assert load_run(file, flags).args.vllm_urls == ["http://c:1", "http://d:2"]


def test_the_key_is_not_shown_to_trackers(tmp_path):
    config = runs.config(tmp_path, **SERVER, vllm_server_api_key="secret")
    assert "secret" not in config.to_json_string()
    assert "secret" not in json.dumps(config.to_sanitized_dict())
    assert "secret" not in str(config) + repr(config)
    assert config.vllm_server_api_key == "secret"


def test_keys_are_in_no_message(tmp_path):
    with pytest.raises(ValueError, match=r"a user or password in its URL.*vllm_server_api_key") as error:
        runs.config(tmp_path, **SERVER, vllm_server_base_url="http://me:secret@a:1")
    assert "secret" not in str(error.value)
    with pytest.warns(UserWarning, match="`vllm_server_api_key=...` has no effect") as caught:
        runs.config(tmp_path, use_vllm=True, vllm_mode="colocate", vllm_server_api_key="secret")
    assert not [one for one in caught if "secret" in str(one.message)]


def test_generation_kwargs_and_the_regex_are_passed_on(tmp_path):
    config = runs.config(
        tmp_path, **SERVER, generation_kwargs={"bad_words": ["x"]}, vllm_structured_outputs_regex="[0-9]+"
    )
    assert generation_extras(config) == {"bad_words": ["x"], "structured_outputs": {"regex": "[0-9]+"}}


def test_generation_kwargs_for_transformers_get_vllm_names(tmp_path):
    given = {"stop_strings": ["</a>"], "min_new_tokens": 4, "do_sample": True}
    assert generation_extras(runs.config(tmp_path, **SERVER, generation_kwargs=given)) == {
        "stop": ["</a>"],
        "min_tokens": 4,
    }


def test_generation_kwargs_get_sglangs_names(tmp_path):
    given = {"stop_strings": ["</a>"], "min_tokens": 4, "do_sample": True}
    extras = generation_extras(runs.config(tmp_path, use_sglang=True, generation_kwargs=given))
    assert extras == {"stop": ["</a>"], "min_new_tokens": 4}


def test_two_shapes_for_completions_are_refused(tmp_path):
    config = runs.config(
        tmp_path,
        **SERVER,
        generation_kwargs={"structured_outputs": {"choice": ["a"]}},
        vllm_structured_outputs_regex="[0-9]+",
    )
    with pytest.raises(ValueError, match="only one can shape completions"):
        generation_extras(config)


@pytest.mark.parametrize("text", [None, "", "localhost\n"])
def test_a_list_of_servers_that_names_none_is_refused(tmp_path, text):
    path = tmp_path / "servers.txt"
    if text is not None:
        path.write_text(text)
    config = runs.config(tmp_path, **SERVER, server_pool_file=str(path))
    with pytest.raises(CheckError) as raised:
        listed(pool_file_of(config, None))
    assert [one.code for one in raised.value.findings] == ["setting-format"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({**SERVER, "server_pool_file": "f", "vllm_server_base_url": "http://a:1"}, "vllm_server_base_url"),
        ({**SERVER, "vllm_weight_transfer": "disk", "vllm_weight_differences": True}, "vllm_weight_differences"),
        ({"use_sglang": True, "server_pool_file": "f", "sglang_device": "cuda:1"}, "sglang_device"),
        ({"use_sglang": True, "vllm_weight_differences": True}, "vllm_weight_differences"),
        ({"use_vllm": True, "server_pool_file": "f"}, "server_pool_file"),
    ],
)
def test_settings_without_effect_are_pointed_out(tmp_path, settings, name):
    with pytest.warns(UserWarning, match=f"`{name}=.*has no effect"):
        runs.config(tmp_path, **settings)
