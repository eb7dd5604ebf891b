"""One behavioural suite for every backend, written against the public API alone.

A case is a function `case(rank, n)` that every rank of an initialised world runs; its asserts are
the contract. The modules group cases by subject; `suite.run` runs one group in one go, so that real
processes, which are dear to start, run hundreds of cases each.
"""
