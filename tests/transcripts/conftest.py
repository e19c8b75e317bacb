import pytest


def pytest_addoption(parser):
    parser.addoption("--rewrite", action="store_true", help="store what the machines say now in tests/transcripts")


@pytest.fixture
def rewrite(request):
    """Is this a run that stores transcripts instead of comparing them?"""
    return request.config.getoption("--rewrite", default=False)
