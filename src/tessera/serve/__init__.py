"""serve: from a model to an HTTP endpoint, with continuous batching over microbatches."""
