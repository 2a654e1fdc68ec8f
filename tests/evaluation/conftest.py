import pytest

from moe_rl.evaluation import SandboxUnavailableError, open_sandbox


@pytest.fixture(scope="session")
def sandbox():
    try:
        return open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
