"""serve: from a model to an HTTP endpoint, with continuous batching over microbatches."""

from tessera import make_callable

make_callable(__name__)  # tessera.serve(model, devices)
