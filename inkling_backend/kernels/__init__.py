"""Triton kernels over the paged, block-scaled cache. Importing a module here compiles nothing."""
