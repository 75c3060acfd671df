"""Commands that are run for files: every value is one word, and nothing else changes."""

from pathlib import Path

import pytest

from torchdata_wds.cli.split import HookCommand

NASTY = ["a b", "", "'", '"', "$(touch bad)", "`touch bad`", "\\", "*", "-n", "{path}", "a\nb", "ü", "; exit 3", "%s"]


def test_every_value_arrives_as_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in it; a value is not looked through for places."""
    monkeypatch.chdir(tmp_path)
    places = [f"p_{'x' * number}" for number in range(len(NASTY))]
    template = "printf '%s|' " + " ".join(f"{{{place}}}" for place in places) + " > out"
    HookCommand(template, places).run(dict(zip(places, NASTY, strict=True)))
    assert (tmp_path / "out").read_text() == "".join(f"{value}|" for value in NASTY)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("cmd {path}", "cmd 'x y'"),
        ("cmd{path}{path}", "cmd'x y''x y'"),
        ("cmd ${path} $path", "cmd ${path} $path"),
        ("cmd \\{path}", "cmd \\{path}"),
        ("awk '{print $1}' {path}", "awk '{print $1}' 'x y'"),
        ("echo ${name} ${count:-2} {a,b} {} {path}", "echo ${name} ${count:-2} {a,b} {} 'x y'"),
        ("echo \\' {path} \\'", "echo \\' 'x y' \\'"),
        ("echo 'a\\' {path}", "echo 'a\\' 'x y'"),
        ("true", "true"),
    ],
)
def test_places_are_filled_where_they_stand_outside_of_quotes(template: str, expected: str) -> None:
    """What belongs to the shell stays as it is."""
    assert HookCommand(template, ["path"]).fill({"path": "x y"}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("cmd '{path}'", "stands inside quotes"),
        ('cmd "a {path} b"', "stands inside quotes"),
        ('cmd "\\"{path}"', "stands inside quotes"),
        ("cmd '\\' \"'{path}\"", "stands inside quotes"),
        ("cmd {paht}", r"unknown place \{paht\}: there are \{path\}, \{name\}"),
        ("cmd 'it", "not closed"),
        ("cmd it's {path}", "not closed"),
    ],
)
def test_templates_that_would_not_do_what_they_look_like_are_refused(template: str, message: str) -> None:
    """Before any command is run."""
    with pytest.raises(ValueError, match=message):
        HookCommand(template, ["path", "name"])


@pytest.mark.parametrize(("command", "status"), [("exit 3", "exit status 3"), ("kill -9 $$", "signal SIGKILL")])
def test_failure_is_an_error_that_masks_secrets(command: str, status: str) -> None:
    """It says how the command ended."""
    with pytest.raises(ChildProcessError, match=status) as caught:
        HookCommand(f": --token=abc; {command}", []).run({})
    assert "abc" not in str(caught.value)
