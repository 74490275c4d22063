"""Exchanges that do not depend on the membership are repeated when it changes."""

from __future__ import annotations

import pytest

from adaptive.base.world_messages import MembersChanged, retry_on_members_changed


def test_an_exchange_is_repeated_until_no_member_is_lost_in_it():
    outcomes = [MembersChanged(), MembersChanged(), "arrived"]

    def exchange():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retry_on_members_changed(exchange) == "arrived"
    assert outcomes == []


def test_other_errors_are_not_caught():
    def exchange():
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        retry_on_members_changed(exchange)
