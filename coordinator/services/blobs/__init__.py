"""Blobs and Data: who may fetch and put what, blobs asked of workers, and which nothing needs any more."""
