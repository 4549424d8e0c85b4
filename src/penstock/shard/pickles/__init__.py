"""An unpickler for data only: a closed list of names, and bounds on what is built, hashed and returned."""
