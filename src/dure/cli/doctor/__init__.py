"""The doctor: finds faults of this machine, and advises how to mend them."""
