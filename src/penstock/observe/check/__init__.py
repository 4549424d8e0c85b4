"""Whether this installation, this machine and data are right, and what to do if they are not. Nothing is changed."""
