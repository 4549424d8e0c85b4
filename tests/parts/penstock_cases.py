"""Fewer random cases for laws with expensive ones: a quarter of what the profile in tests/conftest.py has."""

from hypothesis import settings

__all__ = ["few_cases"]

few_cases = settings(max_examples=max(5, settings.default.max_examples // 4))
