"""`penstock demo`: convert, train, kill, resume, damage and report, on data it generates."""
