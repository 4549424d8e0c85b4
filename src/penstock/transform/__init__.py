"""From item to item; and what is worked out over all of them."""
