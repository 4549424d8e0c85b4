"""Stores that all tests of this folder read and write."""

from collections.abc import Iterator

import pytest
from penstock_remote import Endpoint

from penstock.files.stores.store import Store, open_store


@pytest.fixture
def store(s3: Endpoint) -> Iterator[Store]:
    """The store of a folder in a bucket of this machine."""
    found = open_store(s3.url, s3.options)
    yield found
    found.close()
