"""Tokens show one rank of one job, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.contract.tokens import KEY_BYTES, TOKEN_BYTES, rank_of_token, rank_token

KEY = bytes(range(KEY_BYTES))
ranks = st.integers(0, 2**32 - 1)
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@given(keys, ranks)
def test_a_token_names_its_rank(key: bytes, rank: int) -> None:
    token = rank_token(key, rank)
    assert len(token) == TOKEN_BYTES
    assert rank_of_token(key, token) == rank


@given(keys, ranks)
def test_another_jobs_key_does_not_know_it(key: bytes, rank: int) -> None:
    other = bytes([key[0] ^ 1]) + key[1:]
    assert rank_of_token(other, rank_token(key, rank)) is None


@given(st.integers(0, TOKEN_BYTES - 1), st.integers(1, 255))
def test_a_token_with_any_byte_changed_is_none(index: int, change: int) -> None:
    """That includes the rank: nobody can make another rank's token from one's own."""
    token = bytearray(rank_token(KEY, 3))
    token[index] ^= change
    assert rank_of_token(KEY, bytes(token)) is None


@pytest.mark.parametrize("token", [b"", b"x", bytes(TOKEN_BYTES), bytes(TOKEN_BYTES + 1)])
def test_nonsense_is_none(token: bytes) -> None:
    assert rank_of_token(KEY, token) is None


def test_an_empty_key_knows_no_token() -> None:
    """A process without a server gets an empty key; it must not be one that anybody can guess."""
    assert rank_of_token(b"", rank_token(b"", 0)) is None
