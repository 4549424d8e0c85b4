"""The words: spans, fields, indices, draws, protocols, seeds, errors. Numpy and the standard library only."""
