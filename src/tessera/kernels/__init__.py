"""The project's operators and kernels; accesses (`ptx`) and launches (`launch`) of PTX kernels.

Import `paged` before running traces with tessera::paged_attention: it registers the operator with torch.
"""

# Positions per page of keys and values.
PAGE = 16
