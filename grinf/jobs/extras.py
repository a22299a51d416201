"""Packages that only some commands need: asked for before the work starts."""

from importlib.util import find_spec

from grinf.errors import EnvironmentFault


def require(extra: str, *modules: str) -> None:
    """Refuse to go on without the modules of an extra.

    Raises:
        EnvironmentFault: One is not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        what = f"the package of {', '.join(missing)} is not installed"
        raise EnvironmentFault(what, f"it is part of the extra {extra!r}", f"pip install 'grinf[{extra}]'")
