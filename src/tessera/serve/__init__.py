"""serve: from a model to an endpoint: continuous batching over microbatches, and HTTP in front of it."""
