"""The options of `ggpy serve`, the environment, and the settings that they become."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from ggpy.cli import serve, serve_options
from ggpy.cli.options import ALL_LAYERS, n_cpu_moe

ROOT = Path(__file__).resolve().parents[2]


def settings(words: list[str], **environment: str):
    return serve.server_settings(serve_options.parse(words, environment))


def test_defaults() -> None:
    found = settings(["model.gguf"])
    assert (found.hosts, found.port) == (("127.0.0.1",), 8080)
    assert found.api_keys == ()
    assert found.with_ui
    assert not found.metrics


def test_command_lines_of_llama_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of llama.vim and of Qwen's pages."""
    for words, line in (
        (
            "-ub 512 -b 512 --cache-reuse 256 -kvu",
            "note: no effect here: --cache-reuse 256, -kvu\n",
        ),
        ("-sm row -c 0 -n 99 --no-context-shift", "no effect here: -sm row, --no-context-shift\n"),
        ("-nocb -lm mlock --keep 5", "no effect here: -nocb, -lm mlock, --keep 5\n"),
        ("-C ff --no-log-prefix -cms 64", "no effect here: -C ff, --no-log-prefix, -cms 64\n"),
    ):
        serve_options.parse(["m.gguf", *words.split()], {})
        assert capsys.readouterr().err.endswith(line)


def test_the_environment_gives_what_the_command_line_does_not() -> None:
    environment = {
        "LLAMA_ARG_HOST": "0.0.0.0",
        "LLAMA_ARG_PORT": "9000",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_NO_UI": "true",
        "LLAMA_ARG_N_PARALLEL": "7",
        "LLAMA_ARG_CTX_SIZE": "999",
        "LLAMA_API_KEY": "k",
        "LLAMA_ARG_UNKNOWN": "x",
    }
    options = serve_options.parse(["m.gguf", "--port", "9001"], environment)
    found = serve.server_settings(options)
    assert (found.hosts, found.port) == (("0.0.0.0",), 9001)
    assert found.metrics
    assert not found.with_ui
    assert found.api_keys == ("k",)
    assert (options.parallel, options.ctx_size) == (7, 999)


def test_variables_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"LLAMA_ARG_FLASH_ATTN": "on", "LLAMA_ARG_MLOCK": "1", "LLAMA_ARG_CTXSIZE": "9"}
    serve_options.parse(["m.gguf", "-kvu"], environment)
    told = "LLAMA_ARG_FLASH_ATTN on, LLAMA_ARG_MLOCK, LLAMA_ARG_CTXSIZE, -kvu"
    assert capsys.readouterr().err == f"note: no effect here: {told}\n"
    for variable, text in (("N_GPU_LAYERS", "many"), ("MAIN_GPU", "1")):
        with pytest.raises(SystemExit):  # as on the command line
            serve_options.parse(["m.gguf"], {f"LLAMA_ARG_{variable}": text})
        assert f"LLAMA_ARG_{variable} {text}: " in capsys.readouterr().err
    assert serve_options.parse(["m.gguf"], {"LLAMA_ARG_N_GPU_LAYERS": "0"}).device == "cpu"


@pytest.mark.parametrize(
    ("words", "variables", "model", "hf_repo"),
    [
        (["m.gguf"], ["MODEL", "HF_REPO", "HF_FILE"], "m.gguf", None),
        (["-m", "m.gguf"], ["MODEL", "HF_REPO"], "m.gguf", None),
        (["-hf", "a/b"], ["MODEL", "HF_FILE"], None, "a/b"),
        (["-hff", "y"], ["HF_REPO", "HF_FILE"], None, "x:y"),
        ([], ["HF_REPO", "HF_FILE"], None, "x:x"),
        (["m.gguf", "--chat-template", "chatml"], ["CHAT_TEMPLATE_FILE"], "m.gguf", None),
    ],
)
def test_a_model_of_the_command_line_takes_the_place_of_a_variables(
    words: list[str], variables: list[str], model: str | None, hf_repo: str | None
) -> None:
    environment = {f"LLAMA_ARG_{name}": "x" for name in variables}
    found = serve_options.parse(words, environment)
    assert (found.model, found.hf_repo, found.chat_template_file) == (model, hf_repo, None)


@pytest.mark.parametrize(
    ("words", "environment", "n_layers"),
    [
        *(([], {}, 0), (["-ncmoe", "7"], {"LLAMA_ARG_N_CPU_MOE": "9"}, 7)),
        *(([], {"LLAMA_ARG_N_CPU_MOE": "9"}, 9), (["--cpu-moe"], {}, ALL_LAYERS)),
        ([], {"LLAMA_ARG_CPU_MOE": "1", "LLAMA_ARG_N_CPU_MOE": "9"}, ALL_LAYERS),
        (["-ncmoe", "7"], {"LLAMA_ARG_CPU_MOE": "0"}, 7),
    ],
)
def test_layers_with_experts_in_host_memory(
    words: list[str], environment: dict[str, str], n_layers: int
) -> None:
    assert n_cpu_moe(serve_options.parse(["m.gguf", *words], environment)) == n_layers


def test_reasoning_of_all_requests() -> None:
    """An option asks the template for it, or for how much; variables of the template win."""
    for words, variables, budget in (
        (["--reasoning", "on"], {"enable_thinking": True}, -1),
        (["-rea", "off", "--reasoning-effort", "low"], {"reasoning_effort": "low"}, 0),
        (["--reasoning", "auto", "--reasoning-effort", "default"], {}, -1),
        (["-rea", "on", "--chat-template-kwargs", '{"enable_thinking": 1}'],
         {"enable_thinking": 1}, -1),
    ):  # fmt: skip
        found = settings(["m.gguf", *words])
        assert (found.template_variables, found.reasoning_budget) == (variables, budget)
    assert settings(["m.gguf"], LLAMA_ARG_REASONING="off").reasoning_budget == 0
    words = ["m.gguf", "--reasoning-budget", "500", "--reasoning-budget-message", " Enough."]
    limits = {"LLAMA_ARG_THINK_BUDGET": "500", "LLAMA_ARG_THINK_BUDGET_MESSAGE": " Enough."}
    for found in (settings(words), settings(["m.gguf"], **limits)):
        assert (found.reasoning_budget, found.reasoning_message) == (500, " Enough.")


def test_names_and_tags_of_the_model() -> None:
    found = settings(["m.gguf", "--alias", "one, two", "--tags", "a,b"])
    assert (found.aliases, found.tags) == (("one", "two"), ("a", "b"))
    assert settings(["m.gguf"]).aliases == ()


def test_a_stream_may_have_no_comments() -> None:
    assert settings(["m.gguf"]).ping_seconds == 30
    assert settings(["m.gguf", "--sse-ping-interval", "-1"]).ping_seconds == inf


def test_the_page_by_variables() -> None:
    """llama-server's switch, and a folder."""
    for text, ui in (("0", False), ("false", False), ("1", True), ("on", True)):
        found = settings(["m.gguf"], LLAMA_ARG_UI=text)
        assert (found.with_ui, found.ui) == (ui, None)
    for variable in ("LLAMA_ARG_UI", "LLAMA_ARG_STATIC_PATH"):
        assert settings(["m.gguf"], **{variable: "some/page"}).ui == Path("some/page")


def test_a_variable_that_says_no() -> None:
    environment = {"LLAMA_ARG_NO_SLOTS": "1", "LLAMA_ARG_NO_CACHE_PROMPT": "0"}
    options = serve_options.parse(["m.gguf"], environment)
    assert (options.slots, options.cache_prompt) == (False, True)
    options = serve_options.parse(["m.gguf"], {"LLAMA_ARG_SLOTS": "0"})
    assert options.slots is False


@pytest.mark.parametrize(
    "environment", [{"LLAMA_ARG_PORT": "x"}, {"LLAMA_ARG_ENDPOINT_METRICS": "maybe"}]
)
def test_a_wrong_variable_is_named(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve_options.parse(["m.gguf"], environment)
    assert caught.value.code == 2
    assert next(iter(environment)) in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["a.gguf", "-m", "b.gguf"],
        ["a.gguf", "--ssl-key-file", "k"],
        ["a.gguf", "--port", "70000"],
        ["a.gguf", "--api-prefix", "x"],
        ["a.gguf", "--chat-template", "a", "--chat-template-file", "b"],
        ["a.gguf", "--reasoning-budget", "-2"],
    ],
)
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve_options.parse(words, {})
    assert caught.value.code == 2


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nalpha\n\n  beta \n")
    found = settings(["m.gguf", "--api-key-file", str(path), "--api-key", "gamma,delta"])
    assert found.api_keys == ("gamma", "delta", "alpha", "beta")
    path.write_bytes(b"\xef\xbb\xbfalpha\r\nbeta\r\n")  # of an editor on Windows
    assert settings(["m.gguf", "--api-key-file", str(path)]).api_keys == ("alpha", "beta")
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="no keys"):
        settings(["m.gguf", "--api-key-file", str(path)])
    with pytest.raises(ValueError, match="--api-key is empty"):  # as "$KEY" that is not set
        settings(["m.gguf", "--api-key", ""])


def test_variables_of_the_template() -> None:
    found = settings(["m.gguf", "--chat-template-kwargs", '{"enable_thinking": false}'])
    assert found.template_variables == {"enable_thinking": False}
    for text in ("{", "[]"):
        with pytest.raises(ValueError, match="chat-template-kwargs"):
            settings(["m.gguf", "--chat-template-kwargs", text])


def test_sampling_defaults_are_the_options() -> None:
    found = settings(["m.gguf", "--temp", "0.3", "--top-k", "7", "-n", "99"])
    assert (found.sampling.temperature, found.sampling.top_k, found.max_tokens) == (0.3, 7, 99)


def test_samplers_come_from_options_and_variables() -> None:
    given = ["m.gguf", "--mirostat", "2", "--mirostat-ent", "4", "--samplers", "temp;top_k"]
    found = settings(given).sampling
    assert (found.mirostat, found.mirostat_tau, found.samplers) == (
        2,
        4.0,
        ("temperature", "top_k"),
    )
    variables = {"LLAMA_ARG_ADAPTIVE_TARGET": "0.3", "LLAMA_ARG_SAMPLER_SEQ": "mta"}
    options = serve_options.parse(["m.gguf"], variables)
    assert options.samplers == ("min_p", "temperature", "adaptive_p")
    assert options.adaptive_target == 0.3


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert serve.main(["models/tiny/llama.gguf", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_what_is_wrong_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "models/tiny/llama.gguf"
    assert serve.main([model, "--tool-format", "telepathy"]) == 2
    told = capsys.readouterr().err
    assert "'telepathy'" in told and "hermes" in told and "listening" not in told
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_text("no key")
    words = ["--ssl-key-file", str(key), "--ssl-cert-file", str(certificate)]
    assert serve.main([model, *words]) == 2
    assert f"{certificate}: there is no such file" in capsys.readouterr().err
    certificate.write_text("none")
    assert serve.main([model, *words]) == 2
    told = capsys.readouterr().err
    assert str(certificate) in told and "listening" not in told


def test_a_wrong_number_of_a_variable(capsys: pytest.CaptureFixture[str]) -> None:
    for variable, kind in (("TEMP", "a number"), ("N_PREDICT", "a whole number")):
        with pytest.raises(SystemExit):
            serve_options.parse(["m.gguf"], {f"LLAMA_ARG_{variable}": "x"})
        assert f"LLAMA_ARG_{variable}: 'x' is not {kind} (see" in capsys.readouterr().err


def test_more_positions_than_the_model_knows_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "models" / "tiny" / "llama.gguf"
    common = [str(path), "--device", "numpy", "-np", "1", "-c"]
    for words, told in ((["512"], True), (["512", "--ctx-seq", "256"], False), (["0"], False)):
        with serve.load(path, serve_options.parse([*common, *words], {})):
            line = "note: an answer may have 512 tokens, but the model knows 256: --ctx-seq 256"
            assert (line in capsys.readouterr().err) is told


def test_several_addresses() -> None:
    words = ["m.gguf", "--host", " 127.0.0.1,::1, unix:/tmp/a.sock,::1"]
    assert settings(words).hosts == ("127.0.0.1", "::1", "/tmp/a.sock")
    with pytest.raises(ValueError, match="--host has no address"):
        settings(["m.gguf", "--host", ","])
