"""`penstock convert` and `penstock edit`: the commands that write datasets."""
