"""gin settings: valid ones are read, and invalid ones are one-line errors."""

import dataclasses
from typing import Literal

import pytest

from manus_jax.config import binding as config
from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import config_text


@config.settings("oven")
class Oven:
    degrees: int = config.setting(default=180, at_least=0, at_most=1000)
    hours: float = config.setting(default=1.0, above=0, at_most=24)
    trays: tuple[str, ...] = ()
    mode: Literal["fan", "grill"] = "fan"
    label: str | None = None


@config.settings("fridge")
class Fridge:
    degrees: int = 4


@dataclasses.dataclass(frozen=True)
class Kitchen:
    oven: Oven


def load(*params, classes=(Oven,), files=()):
    config.parse(files, params)
    read = config.setting_names(*(cls.gin_name for cls in classes))
    readers = {"the kitchen": {"fridge.degrees"}}
    config.refuse_unread("the test", lambda name: name not in read, readers)
    config.refuse_unused_macros()
    return config.build(*classes)[0]


def test_bindings_macros_and_defaults_are_read():
    oven = load("HOT = 250", "oven.degrees = %HOT", "oven.hours = 2", "oven.trays = ['a', 'b']")
    assert oven == Oven(degrees=250, hours=2.0, trays=("a", "b"))
    assert isinstance(oven.hours, float)
    with pytest.raises(AttributeError):
        oven.degrees = 1


def test_files_include_files_and_params_win(tmp_path):
    (tmp_path / "base.gin").write_text("oven.degrees = 100\noven.mode = 'grill'\n")
    (tmp_path / "top.gin").write_text(f"include '{tmp_path}/base.gin'\noven.degrees = 120\n")
    oven = load("oven.hours = 3.5", files=[str(tmp_path / "top.gin")])
    assert (oven.degrees, oven.mode, oven.hours) == (120, "grill", 3.5)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfoven.degrees = 5\n", b"oven.degrees = 5\r\n"])
def test_a_file_of_another_system_is_read(tmp_path, content):
    (tmp_path / "f.gin").write_bytes(content)
    assert load(files=[str(tmp_path / "f.gin")]).degrees == 5


def test_the_operative_config_gives_the_same_settings_again(tmp_path):
    first = load("HOT = 250", "oven.degrees = %HOT", "oven.trays = ['x']", "oven.label = 'y z'")
    text = config_text(Kitchen(first), config.setting_names("oven"))
    (tmp_path / "config.gin").write_text(text)
    assert load(files=[str(tmp_path / "config.gin")]) == first


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("oven.degree = 1", r"unknown setting oven\.degree; did you mean 'degrees'\?"),
        ("ovn.degrees = 1", r"unknown setting 'ovn'; did you mean 'oven'\?"),
        ("oven.degrees = 1.5", r"oven\.degrees = 1\.5 is not a whole number"),
        ("oven.degrees = True", "is not a whole number"),
        ("oven.degrees = 'hot'", "is not a whole number"),
        ("oven.mode = 'micro'", "is not one of 'fan', 'grill'"),
        ("oven.trays = [1]", r"oven\.trays = \(1,\) is not a list, each item a string"),
        ("oven.degrees = %NOWHERE", "macro %NOWHERE is used and never set"),
        ("SPARE = 3", "macro SPARE is set, and no binding refers to it"),
        ("fridge.degrees = 5", r"fridge\.degrees is set, but the test does not read it"),
        ("fridge.degrees = 5", "it is read by the kitchen"),
        ("oven.hours = 0", r"oven\.hours = 0\.0 must be above 0"),
        ("oven.hours = 25", r"oven\.hours = 25\.0 must be at most 24"),
        ("oven.degrees", "is not a binding"),
        ("oven.degrees = )", r"--gin_param 'oven\.degrees = \)': Unable to parse value"),
        ("oven.degrees = 2 * 3", "expressions are not evaluated"),
        ("oven.degrees = [1", "a bracket or a string is not closed"),
        ("oven.degrees = inf", "'inf' is not a value: write a number"),
        ("oven.degrees = @oven()", "@oven is not a value"),
        ("kitchen/oven.degrees = 1", "kitchen/ is a scope, and settings have none"),
        ("HOT = %HOT\noven.degrees = %HOT", "macro %HOT refers to itself"),
        ("include 'a=b.gin'", "include is only possible in gin files"),
        ("oven.degrees = " + "[" * 2000, "nested too deeply"),
        ("oven.degrees = 0x" + "f" * 9000, "thousands of digits must be at most 1000"),
        ("degrees = 3", r"no binding refers to it .*; did you mean oven\.degrees or"),
    ],
)
def test_mistakes_are_one_clear_line(param, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(param)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (bytes(range(256)), "is not a text file"),
        ("oven.degrees = 1".encode("utf-16"), "is not a text file"),
        (b"oven.degrees = 1\0", "line 1: "),
        (b"\noven.degrees = = 1", "line 2: Unable to parse value"),
        (b"oven.trays = ['a'\n", "a bracket or a string is not closed"),
        (b"# hot\noven.degrees = 2000", r"line 2: oven\.degrees = 2000 must be at most 1000"),
        (b"oven.degree = 1", r"line 1: unknown setting oven\.degree; did you mean 'degrees'"),
        (b"include 'top.gin'", "includes itself"),
        (b"include 'other.gin'", r"top\.gin includes .*other\.gin, which does not exist"),
        (b"include '.'", "cannot be read: Is a directory"),
        (b"include oven", "'oven' is not a value"),
        (b"import no_such_module", "import no_such_module: ModuleNotFoundError"),
        (b"just words", "line 1: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "top.gin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(files=[str(path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "x" * 300, "\udcff.gin", "/"])
def test_a_path_that_is_no_file_is_named(path):
    with pytest.raises(ConfigError, match="gin file"):
        load(files=[path])
