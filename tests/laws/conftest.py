"""Fixtures: runs that were never stopped."""

from typing import Any

import pytest

from tests.laws.loaders import PLANS, epochs_of, make_loader


@pytest.fixture(scope="session")
def uninterrupted() -> dict[str, list[Any]]:
    """Return every batch of three epochs of each plan, none of them stopped."""
    return {name: epochs_of(make_loader(plan)) for name, plan in PLANS.items()}
