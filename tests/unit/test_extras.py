"""What a missing optional package looks like."""

import pytest

from grinf.errors import EnvironmentFault, ExitCode
from grinf.jobs.extras import require


def test_what_is_installed_is_not_mentioned():
    require("demo", "json", "numpy")


def test_a_missing_package_names_the_extra():
    with pytest.raises(EnvironmentFault) as raised:
        require("demo", "json", "no_such_module")
    assert "no_such_module" in raised.value.what
    assert raised.value.fix == "pip install 'grinf[demo]'"
    assert raised.value.exit_code == ExitCode.ENVIRONMENT
