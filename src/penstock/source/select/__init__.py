"""Choose items of a source by their metadata: conditions, samples and splits, without writing anything."""
