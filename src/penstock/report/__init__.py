"""What a person looks at: figures and summaries of data and of runs."""
