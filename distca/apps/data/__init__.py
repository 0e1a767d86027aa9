"""Training data: a corpus of documents, and their packing into the batches of a step."""
