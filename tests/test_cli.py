from __future__ import annotations

import subprocess
import sys

import pytest

from dapo_components import __version__
from dapo_components.cli import main


def test_ls_shows_recipes_and_configs(capsys):
    assert main(["ls"]) == 0
    output = capsys.readouterr().out
    assert "dapo_full" in output
    assert "tiny_cpu" in output
    assert output.index("recipes\n") < output.index("configs\n")


def test_cp_says_how_to_run_the_copy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "dapo_full", "my_dapo.py"]) == 0
    assert (tmp_path / "my_dapo.py").exists()
    assert "tune run my_dapo.py --config tiny_cpu.yaml" in capsys.readouterr().out


def test_cp_outside_the_working_directory_says_where_to_go(tmp_path, capsys):
    assert main(["cp", "dapo_full", str(tmp_path / "my_dapo.py")]) == 0
    output = capsys.readouterr().out
    assert f"cd {tmp_path.resolve()}" in output
    assert "tune run my_dapo.py " in output


def test_cp_warns_of_a_name_that_tune_resolves_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["cp", "dapo_full", "torch/my_dapo.py"])
    assert "installed package 'torch'" in capsys.readouterr().out


def test_a_users_mistake_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "dapo_full.py").touch()
    assert main(["cp", "dapo_full", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_demo_model_writes_the_folder(tmp_path, capsys):
    assert main(["demo-model", "tiny", str(tmp_path / "model"), "--seed", "3"]) == 0
    assert (tmp_path / "model/model.safetensors").exists()
    assert str(tmp_path / "model") in capsys.readouterr().out


def test_demo_model_refuses_an_unknown_one(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo-model", "gpt2", "x"])
    assert stopped.value.code == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_version_and_ls_load_no_torch():
    # 3 s of import for a listing would be felt at every call.
    code = "import sys; from dapo_components.cli import main; main(['ls']); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"


def test_a_reader_that_stops_early_is_no_error():
    command = f"'{sys.executable}' -m dapo_components.cli ls | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"dapo-components {__version__}"
