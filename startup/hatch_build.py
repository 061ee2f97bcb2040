"""Put the recipes and the start-up files, which live outside the package folder, into the wheel."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STARTUP = {f"startup/dapo_components_startup{end}": f"dapo_components_startup{end}" for end in (".py", ".pth")}


class StartupHook(BuildHookInterface):
    """Choose what goes in beside ``dapo_components``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            build_data["force_include_editable"].update(STARTUP)
        else:
            build_data["force_include"].update(STARTUP | {"recipes": "dapo_components/_recipes"})
