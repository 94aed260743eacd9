"""What a command needs beyond the base installation, checked before it starts working."""

from importlib.util import find_spec

from wavekit_engines.errors import MisuseError


def require(extra: str, *modules: str) -> None:
    """Say what to install where one of an extra's ``modules`` is missing; nothing is imported.

    Raises:
        MisuseError: names the modules that are missing, and the extra that brings them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MisuseError(
            f"this command needs {', '.join(missing)}, not installed here; in a clone of wavekit: "
            f"pip install -c constraints.txt -e '.[{extra}]'"
        )
