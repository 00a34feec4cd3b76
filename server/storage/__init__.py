"""Files of the data folder: written once, whole or not at all; the Parquet layout."""
