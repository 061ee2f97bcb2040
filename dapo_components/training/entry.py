"""The last layer before the user: ``--dry-run``, one-line errors, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRACEBACK_VARIABLE = "DAPO_TRACEBACK"


def run_recipe(recipe_main: Callable[[], object]) -> None:
    """Call a main function decorated with torchtune's ``config.parse``.

    ``--dry-run`` is accepted beside ``key=value`` overrides. Another flag, or a config file that is missing or
    malformed, is reported in one line.

    Args:
        recipe_main: Takes no argument and reads ``sys.argv``.
    """
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    sys.argv = ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv]
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    unknown = [flag for flag in flags if flag.split("=")[0] not in ("--config", "--help")]
    if unknown:
        print(f"error: unknown flag {unknown[0]}; override config keys as key=value, without dashes", file=sys.stderr)
        raise SystemExit(2)
    words = [argument for argument in sys.argv[1:] if "=" not in argument and not argument.startswith("--")]
    if "--config" in sys.argv[:-1]:
        words.remove(sys.argv[sys.argv.index("--config") + 1])
    if words:
        print(f"error: {words[0]!r} is not an override; write it as key=value", file=sys.stderr)
        raise SystemExit(2)
    try:
        with user_errors(FileNotFoundError, OmegaConfBaseException, YAMLError):
            recipe_main()
    except KeyboardInterrupt:
        print("\ninterrupted; the last checkpoint stays as it is", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report exceptions of these kinds as ``error: message`` on standard error and exit with status 2.

    ``DAPO_TRACEBACK=1`` in the environment shows the stack trace instead.

    Args:
        kinds: Exceptions that a user's input can cause here.

    Example:
        >>> with user_errors(ValueError):
        ...     pass
    """
    try:
        yield
    except kinds as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {message}\n({TRACEBACK_VARIABLE}=1 shows where)", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
