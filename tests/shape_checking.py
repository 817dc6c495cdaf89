"""The checker that tests/conftest.py puts on every function of the package: types, and shapes by jaxtyping."""

import beartype

# An int where a float is asked for is fine, as it is to Python's type checkers.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
