"""How many complaints of `tests/language.py` there may be. Only shrinks: `python -m tests.language`."""

TYPES_OF_ONE_NAME: dict[str, int] = {}

RAISES_WITHOUT_A_WORD: dict[str, int] = {}

BANNED_PHRASES: dict[str, int] = {}

DOCSTRINGS_WITHOUT_A_VERB: dict[str, int] = {}

PRIVATE_REACH: dict[str, int] = {}

MODULES_WITHOUT_A_TEST: dict[str, int] = {}

TESTS_WITHOUT_A_MODULE: dict[str, int] = {}
