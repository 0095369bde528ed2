"""Files of columns: Parquet, Arrow and CSV, prepared by a schema and read in batches."""
