"""Doubles and drills for tests: no part of a run imports them."""
