from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from discovery.config import Complaint, ConfigError, Loaded, help_text, in_force, load, options, parse_engine_spec, reference
from engines.types import EngineSpec, Role
from router.settings import ServeSettings


class Inner(msgspec.Struct, frozen=True):
    """Inner."""

    depth_m: Annotated[float, Meta(gt=0, description="How deep.")] = 2.5
    loud: bool = False


class Settings(msgspec.Struct, frozen=True):
    """A made-up command."""

    port: Annotated[int, Meta(ge=0, le=65535, description="Where to listen.")] = 80
    name: str | None = None
    mode: Literal["fast", "slow"] = "fast"
    engine: tuple[EngineSpec, ...] = ()
    tags: tuple[str, ...] = ()
    inner: Inner = Inner()
    door_code: Annotated[str | None, Meta(extra={"secret": True})] = None
    limit: Annotated[int, Meta(ge=1)] | None = None

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        if "tags" in given and self.mode == "slow":
            yield Complaint("tags", "has no effect with mode 'slow'")


def loaded(*argv: str, toml: str | None = None, **environ: str) -> Loaded[Settings]:
    def read_file(path: str) -> str:
        if toml is None or path != "c.toml":
            raise FileNotFoundError(2, "No such file or directory", path)
        return toml

    arguments = [*argv, "--config", "c.toml"] if toml is not None else argv
    return load(Settings, argv=arguments, environ=environ, read_file=read_file, known_variables=("COMMUTATOR_ELSEWHERE",))


def complaints(*argv: str, toml: str | None = None, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        loaded(*argv, toml=toml, **environ)
    return str(error.value).splitlines()


def test_key_variable_and_flag_are_derived_from_the_path() -> None:
    names = {option.key: (option.variable, option.flag, option.negated_flag) for option in options(Settings)}
    assert names["port"] == ("COMMUTATOR_PORT", "--port", None)
    assert names["inner.depth_m"] == ("COMMUTATOR_INNER_DEPTH_M", "--inner-depth-m", None)
    assert names["inner.loud"] == ("COMMUTATOR_INNER_LOUD", "--inner-loud", "--no-inner-loud")


def test_nothing_given_is_all_defaults() -> None:
    result = loaded()
    assert result.settings == Settings()
    assert result.sources == {}
    assert not result.check_only


LAYERS = ("default", "toml", "variable", "flag")


@pytest.mark.parametrize("top", LAYERS)
def test_the_highest_layer_wins_and_is_named(top: str) -> None:
    height = LAYERS.index(top)
    no_variables: dict[str, str] = {}
    result = loaded(
        *(["--inner-depth-m", "4"] if height >= 3 else []),
        toml="[inner]\ndepth_m = 2" if height >= 1 else None,
        **({"COMMUTATOR_INNER_DEPTH_M": "3"} if height >= 2 else no_variables),
    )
    assert result.settings.inner.depth_m == [2.5, 2.0, 3.0, 4.0][height]
    assert result.sources.get("inner.depth_m") == [None, "c.toml: inner.depth_m", "COMMUTATOR_INNER_DEPTH_M", "--inner-depth-m"][height]


@pytest.mark.parametrize("argv", [("--port", "81"), ("--port=81",), ("--port", "5", "--port", "81")])
def test_a_flag_takes_its_value_either_way_and_the_last_one_counts(argv: tuple[str, ...]) -> None:
    assert loaded(*argv).settings.port == 81


def test_a_value_may_hold_an_equals_sign_and_begin_with_a_dash() -> None:
    assert loaded("--name=a=b").settings.name == "a=b"
    assert loaded("--name", "-x").settings.name == "-x"


def test_switches_stand_alone_and_can_be_negated() -> None:
    assert loaded("--inner-loud").settings.inner.loud
    assert not loaded("--no-inner-loud", COMMUTATOR_INNER_LOUD="true").settings.inner.loud
    assert loaded(toml="inner.loud = true").settings.inner.loud


def test_a_list_is_repeated_as_a_flag_divided_by_semicolons_in_a_variable_and_a_list_in_toml() -> None:
    assert loaded("--tags", "a", "--tags", "b,c").settings.tags == ("a", "b,c")
    assert loaded(COMMUTATOR_TAGS="a; b,c;").settings.tags == ("a", "b,c")
    assert loaded(toml='tags = ["a", "b,c"]').settings.tags == ("a", "b,c")


def test_a_list_replaces_the_list_of_the_layer_below() -> None:
    assert loaded("--tags", "flag", toml='tags = ["file"]', COMMUTATOR_TAGS="variable").settings.tags == ("flag",)


def test_engines_are_lines_everywhere_and_tables_in_toml() -> None:
    expected = (EngineSpec("http://a:1"), EngineSpec("http://b:2", kv_events="tcp://b:3", role=Role.DECODE))
    line = "http://b:2,kv-events=tcp://b:3,role=decode"
    assert loaded("--engine", "http://a:1", "--engine", line).settings.engine == expected
    assert loaded(COMMUTATOR_ENGINE=f"http://a:1;{line}").settings.engine == expected
    assert loaded(toml=f'engine = ["http://a:1", "{line}"]').settings.engine == expected
    table = '[[engine]]\nurl = "http://a:1"\n[[engine]]\nurl = "http://b:2"\nkv_events = "tcp://b:3"\nrole = "decode"'
    assert loaded(toml=table).settings.engine == expected


@pytest.mark.parametrize(
    ("argv", "toml", "environ", "expected"),
    [
        (["--prot", "1"], None, {}, "unknown option --prot; did you mean '--port'?"),
        (["--inner-depth", "1"], None, {}, "unknown option --inner-depth; did you mean '--inner-depth-m'?"),
        (["--no-port"], None, {}, "unknown option --no-port"),
        (["-p"], None, {}, "unknown option -p"),
        ([], "prot = 1", {}, "c.toml: unknown key prot; did you mean 'port'?"),
        ([], "[inner]\ndepth = 1", {}, "c.toml: unknown key inner.depth; did you mean 'inner.depth_m'?"),
        ([], "[outer]\nx = 1", {}, "c.toml: unknown key outer"),
        ([], None, {"COMMUTATOR_PROT": "1"}, "unknown variable COMMUTATOR_PROT; did you mean 'COMMUTATOR_PORT'?"),
    ],
)
def test_U3_an_unknown_option_is_an_error_that_names_it(
    argv: list[str], toml: str | None, environ: Mapping[str, str], expected: str
) -> None:
    assert complaints(*argv, toml=toml, **environ)[0].startswith(expected)


def test_U3_an_option_without_effect_is_an_error_that_names_where_it_was_set() -> None:
    assert complaints("--mode", "slow", COMMUTATOR_TAGS="x") == ["COMMUTATOR_TAGS: has no effect with mode 'slow'"]


@pytest.mark.parametrize(
    ("argv", "toml", "environ", "expected"),
    [
        (["--port", "70000"], None, {}, "--port: '70000' is not allowed; allowed is a whole number, at least 0, at most 65535"),
        ([], None, {"COMMUTATOR_PORT": "x"}, "COMMUTATOR_PORT: 'x' is not allowed; allowed is a whole number, at least 0, at most 65535"),
        ([], "port = '80'", {}, "c.toml: port: '80' is not allowed; allowed is a whole number, at least 0, at most 65535"),
        ([], "port = true", {}, "c.toml: port: true is not allowed; allowed is a whole number, at least 0, at most 65535"),
        (["--mode", "medium"], None, {}, "--mode: 'medium' is not allowed; allowed is one of fast, slow"),
        (["--inner-depth-m", "nan"], None, {}, "--inner-depth-m: 'nan' is not allowed; allowed is a number, more than 0"),
        ([], "inner.depth_m = inf", {}, "c.toml: inner.depth_m: inf is not allowed; allowed is a number, more than 0"),
        (["--limit", "0"], None, {}, "--limit: '0' is not allowed; allowed is a whole number, at least 1"),
        (["--port"], None, {}, "--port: a value is needed: a whole number, at least 0, at most 65535"),
        (["--port", "--inner-loud"], None, {}, "--port: a value is needed: a whole number, at least 0, at most 65535"),
        (["--engine", "h:1"], None, {}, "--engine: 'h:1' has no scheme; write http://h:1"),
        ([], "engine = [5]", {}, "c.toml: engine: 5 is neither a line nor a table that describes an engine"),
        ([], "engine = 'http://h:1'", {}, "c.toml: engine: 'http://h:1' is not allowed; allowed is a list, each item an engine"),
        (["extra"], None, {}, "unexpected argument 'extra': every option has a name, --NAME VALUE"),
        (
            ["--door-code", "1234", "--port", "x"],
            None,
            {},
            "--port: 'x' is not allowed; allowed is a whole number, at least 0, at most 65535",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_its_source_and_what_is_allowed(
    argv: list[str], toml: str | None, environ: Mapping[str, str], expected: str
) -> None:
    assert complaints(*argv, toml=toml, **environ) == [expected]


def test_all_complaints_come_at_once() -> None:
    assert len(complaints("--prot", "1", toml="x = 1", COMMUTATOR_PORT="x")) == 4  # the option, its value, the key, the variable


def test_a_configuration_file_that_cannot_be_used_says_why() -> None:
    assert complaints("--config", "none.toml") == ["--config none.toml: cannot be read: No such file or directory"]
    assert complaints(COMMUTATOR_CONFIG="none.toml") == ["--config none.toml: cannot be read: No such file or directory"]
    assert complaints(toml="port = ")[0].startswith("--config c.toml: not TOML: ")


def test_variables_of_others_are_not_ours_to_complain_about() -> None:
    assert loaded(COMMUTATOR_ELSEWHERE="x", PATH="/bin").settings == Settings()


def test_variables_that_kubernetes_sets_for_a_service_named_commutator_are_no_settings() -> None:
    links = {
        "COMMUTATOR_PORT": "tcp://10.0.0.1:8080",
        "COMMUTATOR_SERVICE_HOST": "10.0.0.1",
        "COMMUTATOR_SERVICE_PORT": "8080",
        "COMMUTATOR_SERVICE_PORT_HTTP": "8080",
        "COMMUTATOR_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "COMMUTATOR_PORT_8080_TCP_ADDR": "10.0.0.1",
        "COMMUTATOR_ROUTER_SERVICE_HOST": "10.0.0.2",
        "COMMUTATOR_ROUTER_PORT": "tcp://10.0.0.2:80",
    }
    assert loaded(**links).settings == Settings()


def test_U3_check_config_prints_what_is_in_force_and_can_be_loaded_again() -> None:
    first = loaded(
        "--check-config",
        "--engine",
        "http://a:1,block-size=32",
        "--inner-loud",
        toml='name = "quo\\"ted ü"',
        COMMUTATOR_TAGS="a;b",
    )
    assert first.check_only
    text = in_force(first)
    assert loaded(toml=text).settings == first.settings
    assert 'name = "quo\\"ted ü"  # c.toml: name' in text
    assert 'tags = ["a", "b"]  # COMMUTATOR_TAGS' in text
    assert "depth_m = 2.5  # default" in text
    assert "loud = true  # --inner-loud" in text
    assert "# door_code is not set" in text


def test_A7_check_config_masks_secrets() -> None:
    text = in_force(loaded("--door-code", "canary", "--engine", "http://a:1,api-key=canary", "--name", "nats://user:canary@h:1"))
    assert "canary" not in text
    assert tomllib.loads(text)["door_code"] == "***"


@pytest.mark.parametrize(
    "argv",
    [
        ["--engine", "http://user:canary@h:1"],
        ["--engine", "h:1,api-key=canary"],
        ["--engine", "api-key=canary,http://h:1"],
        ["--engine", "http://h:1,api-key=canary,role=x"],
        ["--engine", "http://h:1,api-key=canary,api-key=canary"],
        ["--engine", "http://h:1,api_key:canary"],
    ],
)
def test_A7_no_complaint_shows_a_secret(argv: list[str]) -> None:
    assert "canary" not in "\n".join(complaints(*argv))


def test_help_names_every_option_with_its_default_and_choices() -> None:
    text = help_text("made-up", Settings)
    assert "--port N\n      Where to listen. [default: 80]" in text
    assert "--mode fast|slow" in text
    assert "--inner-loud, --no-inner-loud\n" in text
    assert all(option.flag in text for option in options(Settings))


def test_the_reference_has_a_row_for_every_option() -> None:
    rows = [line for line in reference({"made-up": Settings}).splitlines() if line.startswith("| `")]
    assert len(rows) == len(options(Settings))
    assert "| `port` | `--port` | `COMMUTATOR_PORT` | a whole number, at least 0, at most 65535 | `80` | Where to listen. |" in rows


# ------------------------------------------------------------------------------------------------------- lines for engines


def test_an_engine_is_written_in_one_line() -> None:
    line = (
        "http://h:8000/,kv-events=tcp://h:5557,kv-replay=tcp://h:5558,kv-topic=kv,role=prefill,block-size=16,"
        "tokenizer=/models/a=b, api-key=k"
    )
    assert parse_engine_spec(line) == EngineSpec(
        url="http://h:8000",
        role=Role.PREFILL,
        kv_events="tcp://h:5557",
        kv_replay="tcp://h:5558",
        kv_topic="kv",
        block_size=16,
        tokenizer="/models/a=b",
        api_key="k",
    )


@pytest.mark.parametrize("url", ["http://h:80", "http://h", "http://H/", "HTTP://h:80/"])
def test_an_engine_has_one_spelling_however_it_is_written(url: str) -> None:
    assert parse_engine_spec(url).url == "http://h:80"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("h:8000", "'h:8000' has no scheme; write http://h:8000"),
        ("", "'' has no scheme; write http://"),
        ("tcp://h:8000", "engine URL 'tcp://h:8000': must start with http:// or https://"),
        ("http://h:99999", "engine URL 'http://h:99999': Port out of range 0-65535"),
        ("http://:8000", "engine URL 'http://:8000': has no host"),
        ("http://h:1/v1", "engine URL 'http://h:1/v1': must be scheme://host:port, without a path"),
        ("http://h:1,kv-event=tcp://h:2", "unknown key 'kv-event'; did you mean 'kv-events'?"),
        ("http://h:1,role=both", "role: Invalid enum value 'both'; one of aggregated, prefill, decode"),
        ("http://h:1,block-size=x", "block-size: Expected `int | null`, got `str`"),
        ("http://h:1,block-size=0", "block-size must be at least 1, not 0"),
        ("http://h:1,kv-events=h:2", "kv-events='h:2' is not a ZMQ address; write tcp://HOST:PORT"),
        ("http://h:1,kv-replay=tcp://h:2", "kv-replay has no effect without kv-events"),
        ("http://h:1,connector=nixl", "connector has no effect without role=prefill or role=decode"),
        ("http://h:1,role=aggregated,link=1GbE", "connector, bootstrap, link and group have no effect with role=aggregated"),
        (
            "http://h:1,role=decode,bootstrap=http://h:2",
            "bootstrap has no effect with role=decode: it is where a prefill engine is asked for its part",
        ),
        (
            "http://h:1,role=prefill,connector=nixl,bootstrap=http://h:2",
            "bootstrap has no effect with connector=nixl, whose prefill engines say in each answer where they are asked",
        ),
        ("http://h:1,http://h:2", "'http://h:2': expected key=value; a second engine is a second item"),
        ("http://h:1,role=decode,role=prefill", "'role' is given twice"),
        ("role=decode,http://h:1", "'role=decode,http://h:1': the URL comes first, then key=value parts"),
    ],
)
def test_a_line_that_names_no_engine_says_what_is_wrong(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_engine_spec(line)
    assert str(error.value) == expected


@given(st.text())
def test_any_text_is_an_engine_or_a_configuration_error(text: str) -> None:
    for line in (text, f"http://{text}", f"http://h:1,{text}", f"http://h:1,block-size={text}"):
        with suppress(ConfigError):
            assert parse_engine_spec(line).url


@given(st.lists(st.text()), st.dictionaries(st.text().map("COMMUTATOR_{}".format), st.text()))
def test_any_command_line_and_environment_are_settings_or_a_configuration_error(argv: list[str], environ: dict[str, str]) -> None:
    with suppress(ConfigError):
        assert load(Settings, argv=argv, environ=environ, read_file=lambda path: path).settings


def test_serve_s_settings_travel_whole_and_every_bound_of_theirs_can_be_checked() -> None:
    loaded = load(
        ServeSettings,
        argv=[
            "--engine",
            "http://a:1,api-key=k",
            "--admission-tenant-header",
            "x-tenant",
            "--policy",
            "blocks",
            "--blocks-prefill-load-scale",
            "2",
        ],
        environ={},
        read_file=str,
    )
    assert loaded.settings.admission.tenant_header == "x-tenant"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(loaded.settings), type=ServeSettings) == loaded.settings
