"""Digits without scikit-learn."""

import pytest

from dure.data import digits
from dure.data.images import load_digits
from dure.errors import DataError


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_digits()
    assert "'.[demo]'" in caught.value.fix
