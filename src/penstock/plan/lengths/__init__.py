"""Plans that know the length of every item: batches of near lengths, of so many tokens, and of packed rows."""
