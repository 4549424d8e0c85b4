"""Change datasets: choose, order, divide and merge items of shards, and drop, rename or add fields."""
