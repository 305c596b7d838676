"""A scripted TextCraft server for the tests of the pool."""

from collections.abc import Iterator

import pytest
from scripted_servers import TextcraftStub, serving


@pytest.fixture
def stub() -> TextcraftStub:
    return TextcraftStub()


@pytest.fixture
def url(stub: TextcraftStub) -> Iterator[str]:
    with serving(stub) as address:
        yield address
