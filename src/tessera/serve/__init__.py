"""serve: from a model to an endpoint: continuous batching over slots, and HTTP in front of it."""
