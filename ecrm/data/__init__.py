"""Click logs: read, generated, prepared, and handed to training in batches."""
