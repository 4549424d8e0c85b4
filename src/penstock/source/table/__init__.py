"""Items from rows of tables: Parquet, Arrow and CSV files, data frames, Hugging Face datasets."""
