"""The doctor: what is wrong with this machine, in plain words, and what to do about it."""
