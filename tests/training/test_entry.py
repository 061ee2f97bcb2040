"""A user's mistake is one line on standard error and exit status 2; a stack trace is there on request."""

from __future__ import annotations

import sys

import pytest
from omegaconf import OmegaConf

from dapo_components.training.entry import run_recipe, user_errors


def report(capsys, error: Exception, *kinds: type[Exception]) -> str:
    with pytest.raises(SystemExit) as stopped, user_errors(*kinds):
        raise error
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


class TestUserErrors:
    def test_the_message_is_shown_without_a_stack_trace(self, capsys):
        text = report(capsys, ValueError("seed must be >= 0, got -1"), ValueError)
        assert text == "error: seed must be >= 0, got -1\n(DAPO_TRACEBACK=1 shows where)\n"

    def test_subclasses_count_and_key_errors_lose_their_quotes(self, capsys):
        text = report(capsys, KeyError("DAPOLoss needs the key 'advantage'"), ValueError, LookupError)
        assert text.startswith("error: DAPOLoss needs the key 'advantage'\n")

    def test_a_file_error_names_the_file(self, capsys, tmp_path):
        with pytest.raises(SystemExit), user_errors(FileNotFoundError):
            (tmp_path / "absent.yaml").read_text()
        assert "No such file or directory" in (text := capsys.readouterr().err)
        assert str(tmp_path / "absent.yaml") in text

    def test_other_errors_are_not_touched(self):
        with pytest.raises(RuntimeError, match="a bug"), user_errors(ValueError):
            raise RuntimeError("a bug")

    def test_the_stack_trace_is_there_on_request(self, monkeypatch, capsys):
        monkeypatch.setenv("DAPO_TRACEBACK", "1")
        with pytest.raises(ValueError, match="seed"), user_errors(ValueError):
            raise ValueError("seed")
        assert capsys.readouterr().err == ""


class TestRunRecipe:
    def test_dry_run_is_a_config_key(self, monkeypatch):
        seen: list[str] = []
        monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", "a.yaml", "--dry-run", "seed=3"])
        run_recipe(lambda: seen.extend(sys.argv))
        assert seen == ["recipe.py", "--config", "a.yaml", "dry_run=true", "seed=3"]

    @pytest.mark.parametrize("flag", ["--seed=3", "--resume"])
    def test_an_unknown_flag_is_one_line(self, monkeypatch, capsys, flag):
        monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", "a.yaml", flag])
        with pytest.raises(SystemExit) as stopped:
            run_recipe(lambda: pytest.fail("the recipe ran"))
        assert stopped.value.code == 2
        assert capsys.readouterr().err == (
            f"error: unknown flag {flag}; override config keys as key=value, without dashes\n"
        )

    def test_an_error_of_the_recipe_itself_keeps_its_stack_trace(self, monkeypatch):
        def fails() -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(sys, "argv", ["recipe.py"])
        with pytest.raises(ValueError, match="a bug"):
            run_recipe(fails)

    def test_a_config_that_is_malformed_or_missing_is_one_line(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(sys, "argv", ["recipe.py"])
        (tmp_path / "broken.yaml").write_text("seed: [1, 2\n")
        (tmp_path / "circle.yaml").write_text("a: ${b}\nb: ${a}\n")

        def resolve() -> None:
            OmegaConf.resolve(OmegaConf.load(tmp_path / "circle.yaml"))

        for main in (
            lambda: OmegaConf.load(tmp_path / "absent.yaml"),
            lambda: OmegaConf.load(tmp_path / "broken.yaml"),
            resolve,
        ):
            with pytest.raises(SystemExit) as stopped:
                run_recipe(main)
            assert stopped.value.code == 2
            text = capsys.readouterr().err
            assert text.startswith("error: ")
            assert text.endswith("(DAPO_TRACEBACK=1 shows where)\n")
            assert "Traceback" not in text
