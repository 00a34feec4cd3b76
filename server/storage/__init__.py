"""Files of the data folder, written atomically and never changed; the Parquet layout."""
